"""SCMoE-PFL: overlapping clusters train experts, and each client weighs its experts and a private model by a gate.

Li, Jia, Liu, Zhang, Wang, SCMoE-PFL: A soft-clustering mixture-of-experts framework for personalized federated
learning, Information Fusion 2026 (paper 001).

| paper | here |
|---|---|
| D_L, D_H | `--sensitive` (a share) or `--sensitive-column`; splits "train/low" and "train/high" |
| shared model on D_L | `train`: `client.model_choice.ChooseAndTrain` with `train.rows=low` |
| g_i, unit length, PCA (Eq. 1-2) | what training changed: `clusterers.directions`; `cluster.share` |
| MCTC: K, τ (Alg. 1, Eq. 4) | `cluster.clusters`, `cluster.threshold`: `clusterers.overlapping.OverlappingClusters` |
| validation (Eq. 3) | `cluster.validate`, `cluster.limit` |
| experts (Eq. 5), weights n_i = rows of D_L | `stages.overlapping.FormOverlappingClusters`, `stages.train.Federate` |
| the most accurate expert goes on | `train.judge`: on validation rows of low sensitivity |
| private model on D_H | `private`: trained when the fleet is evaluated, never sent |
| gate: s, prior, E, β, Top-2, p (Alg. 2) | `gate`: `client.gate.Gate`, trained on all of a client's rows |

In the paper every client takes part in every round: `--cohort 1.0`. A client is sent only those of its experts that it
does not have yet.

Deviation: "gradients" are what several local steps changed, for there is no other; there is no number m in the paper,
so components are those that hold 95 % of the variance, and of an update with more than 2^18 numbers a random sketch is
kept, which changes cosines by about 0.002. Seeds of clusters are guarded: one that would be a member of an earlier
seed's cluster is passed over, for without that two seeds often fall into one group; a low threshold then makes fewer
clusters, not more overlap (`cluster.guarded=false` is the letter). What happens after a failed validation is open: the
threshold rises by 0.1 up to 0.6, then there is a cluster less. The paper does not say on which rows experts are
compared: here on validation rows, which nothing trains on. The private model starts from the client's best expert and
is trained when it is needed (with `private.start=cold` from the first model that the client was sent, on in every round
in which it takes part); logits are mixed, not probabilities (`gate.mix`): both were better. Adam's epsilon is 1e-4, so
that fleets agree. Of more than `gate.shortlist` experts the gate runs only those with the largest priors, so that a
prediction does not cost as many models as there are clusters (`gate.shortlist=0` runs all, as Alg. 2 does). Who has no
gate for the experts that it is served, such as a client that never trained, weighs them by their confidence.

Ablations: `cluster.by=kmeans` (without MCTC), `cluster.by=one` (one global expert), `components.gate=false` (the mean
of a client's experts, without private model and gate), `gate.calibrate=false`, `gate.prior=uniform`, `gate.top`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import HasOptions, Method, option

PIECES = {"represent": "updates", "cluster": "mctc", "personalise": "gate"}
DEFAULTS = {"train": {"rows": "low"}, "private": {"rows": "high"}}


@dataclass(frozen=True)
class Components(HasOptions):
    """What of the method is used."""

    group: ClassVar[str] = "components"
    gate: bool = option(True, "Train a private model and a gate; else clients predict with the mean of their experts.")


def scmoe(setting: Setting) -> Method:
    gate = setting.make("components", Components).gate
    return compose(setting, "scmoe", PIECES if gate else PIECES | {"personalise": "none"}, DEFAULTS)
