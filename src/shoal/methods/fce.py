"""FedClusterEnsemble: clusters train apart, members in turn; whoever is in no cluster is answered by the surest model.

Freitas, Akabane, Estrella, FedClusterEnsemble: Enhancing clustered federated learning through confidence-based
ensembles and cyclic intra cluster client selection (paper 004).

| paper | here |
|---|---|
| round 1: all clients train w_0 (Alg. 2, 4-6) | `stages.ensemble.InTurn`: everybody who is in no cluster |
| DBSCAN on last layers (9-10): ε, min_samples | `cluster.reach`, `cluster.smallest`: `clusterers.NeighbourClusters` |
| w_m, weighed by rows (13-14) | `stages.ensemble.TrainApart`, `stages.train.Federate` |
| one client of each cluster in turn (18-21) | `select.take=one`: w_m is that client's model, bit for bit |
| 70 % of each cluster in turn (Sec. 4, item 4) | `select.take=share`, `select.share`: `selectors.turns` |
| confidence (Alg. 3) | `serve.rule=logit`: `client.ensemble.Confidence` |
| client updates (Eq. 4) | `train.updates` of a round, `updates` of the result |

`--cohort` plays no part: `select` says how many take part.

Deviation: line 9 takes the last layer of the mean, of which there is one; here of the clients' models, as in Sec. 4.
Of ε and min_samples no values are given: half the median distance, and 2. Noise is not spoken of: it joins the cluster
that is nearest on average, and where there is no cluster at all, there is one. One client of one cluster would be one
client of all: with a single cluster `select.take=one` takes a share.

Deviation: "in turn" is a line in which whoever took part stands last: with everybody there it is the cyclic schedule,
and whoever is away holds up nobody. Who was silent in the first round, or comes later, trains the first model once,
joins the cluster nearest to its last layer by the rule for noise, and is averaged in from then on. Who has no rows is
in no cluster. Both are served the ensemble until they are in one.

Deviation: the largest logit says little about whose row it is: on label groups it sends half of Fashion-MNIST's rows to
the wrong model. `serve.rule=density` asks instead where a row lies: the mean of the first round (line 8, which the
paper computes and does not use) describes rows by what its ReLUs give, members tell once how many rows of each class
they have, and the sums of features and of their products, and every cluster is a mixture of Gaussians around its
classes. The largest logit counts beside the log density with `serve.trust`. Members' labels are then known to the
server; `serve.mask=read` shows that they are anyway, from the biases of the first round.
"""

from __future__ import annotations

import torch

from shoal.client.ensemble import Confidence, ensemble_predict, ensemble_route
from shoal.client.histogram import LabelHistogram
from shoal.client.moments import FeatureMoments
from shoal.client.train import LocalTraining
from shoal.methods.setting import Setting
from shoal.rng import derive_seed
from shoal.stages.describe import LABELS, Describe, served_by
from shoal.stages.ensemble import FIRST, InTurn, Neighbours, TrainApart, trained_by
from shoal.stages.experts import numbered
from shoal.stages.represent import AskOnce
from shoal.stages.train import Federate, Rate
from shoal.types import Method, ServerState, Stage


def fce(s: Setting) -> Method:
    program = s.training("train", LocalTraining)
    rate = s.make("train", Rate, lr=program.lr, rounds=s.rounds)
    train = s.make("train", Federate, program=program, models_for=trained_by(s.model), rate=rate)
    confidence = s.make("serve", Confidence)
    dense = confidence.rule == "density"
    apart = TrainApart(train, s.make("cluster", Neighbours), s.model, average=dense)

    def init(seed: int) -> ServerState:
        first = derive_seed(seed, "init")
        model = s.model.init(first)
        if dense:  # a network that cannot be described by is refused before any client is asked
            s.model.features(model, torch.zeros(2, *s.model.input_shape, device=s.model.device), confidence.width)
        return ServerState(0, numbered([model]), memory={FIRST: {"seed": torch.tensor(first)}})

    return Method(
        name="fce",
        init=init,
        stages=(s.make("select", InTurn), apart, *asked(s, confidence)),
        models_for=served_by(s.model, confidence),
        predict=ensemble_predict(s.model, confidence),
        classes=s.model.classes,
        route=ensemble_route(s.model, confidence),
    )


def asked(s: Setting, confidence: Confidence) -> tuple[Stage, ...]:
    """What members tell beside their models, for the sake of those who never train."""
    describe = (Describe(FeatureMoments(s.model, confidence.width)),) if confidence.rule == "density" else ()
    labels = (AskOnce(LabelHistogram(s.model.classes, name=LABELS), name=LABELS),) if confidence.mask == "told" else ()
    return (*describe, *labels)
