"""The capabilities that pieces provide to each other.

A piece that requires a capability fits every piece that provides it, including pieces that users write. `fit.py`
refuses other combinations.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capability:
    """A property of a method that one piece provides and another one requires."""

    name: str  # as it is written in error messages: "... needs NAME"


# Representations of clients
LABEL_DISTRIBUTIONS = Capability("label distributions of clients")
SPARSITY_VECTORS = Capability("activation sparsity of clients, over all samples and over two halves of them")
UPDATE_DIRECTIONS = Capability("directions of the clients' last updates")
CLIENT_VECTORS = Capability("one vector for each client")
VECTORS_BEFORE_TRAINING = Capability("vectors of clients that are known before training")
FIRST_ROUND_MODELS = Capability("the models of the first round")

# Models
ONE_MODEL = Capability("one model that all clients share")
ONE_MODEL_PER_CLIENT = Capability("exactly one model for every client to train")
GLOBAL_MODEL = Capability("a global model")
PERSISTENT_MODELS = Capability("models that keep their identity from round to round")
CLUSTER_MODELS = Capability("disjoint clusters with a model each")
OVERLAPPING_CLUSTERS = Capability("overlapping clusters with a model each")
EXPERTS_BESIDE_GLOBAL = Capability("experts beside a global model")
EXPERTS = Capability("several experts to weigh")
CLUSTERS_TO_SELECT_FROM = Capability("clusters of clients to select from")

# Training and aggregation
PERSONAL_TRAINING = Capability("training that starts from the client's personal model")
TRAINING_METRICS = Capability("accuracy and loss of the plain objective after training")
INDIVIDUAL_UPDATES = Capability("updates of individual clients at the server")
UPDATE_SUMMARIES = Capability("a summary of every update: its loss and its norm")

# Serving
SERVED_MODEL_PREDICTIONS = Capability("predictions of the served models themselves")
PERSONAL_MODEL = Capability("a personal model of every client")
CLASS_PRIOR = Capability("predictions corrected by the client's class prior")
