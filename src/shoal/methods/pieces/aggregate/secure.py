"""Secure aggregation: the server learns only sums of updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.client.secure_aggregation import KEYS, SendPublicKey, TrainAndMaskUpdate
from shoal.methods.composition.aggregation import training_stage_fields
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import ONE_MODEL_PER_CLIENT
from shoal.methods.composition.piece import Piece, register
from shoal.stages.query import QueryClients
from shoal.stages.secure_aggregation import AggregateSecurely, UnmaskSums
from shoal.types import option


@register("aggregate", "secure")
@dataclass(frozen=True)
class SecureSum(Piece):
    """Averages the trained models from sums of updates. Pairwise masks hide the update of each client."""

    source = "Bonawitz et al. 2017, pairwise masks, without secret sharing of keys"
    group = "secure"
    requires = (ONE_MODEL_PER_CLIENT,)
    requires_reason = "the server has no update of an individual client"
    client_sends = "a public key, once; then its update, under masks that cancel in the sum"
    client_keeps = "a private key, and the public keys of the other clients in its sum"
    server_learns = "whether each client has samples, and the sum of the updates"

    min_clients: int = option(
        3, "Add up the updates of at least this many clients with samples. With fewer, no client trains.", ge=2
    )

    def add_to(self, method: MethodBuilder) -> None:
        if method.setting.edges is not None:
            method.refuse(self, "edges would learn the updates of individual clients; leave --edges out")
        aggregation = method.setting.make(
            "train", AggregateSecurely, ("min_clients",), **training_stage_fields(method), min_clients=self.min_clients
        )
        training = method.ensure_set(method.training, "training")
        method.aggregation = replace(
            aggregation, program=TrainAndMaskUpdate(training, is_weighted_by_samples=aggregation.weighting == "size")
        )
        method.stages["represent"].append(QueryClients(SendPublicKey(), name=KEYS))
        method.stages["aggregate"].append(UnmaskSums())
