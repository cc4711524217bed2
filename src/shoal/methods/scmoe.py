"""SCMoE-PFL: overlapping clusters train experts, and each client weighs its experts and a personal model by a gate.

Li, Jia, Liu, Zhang, Wang, SCMoE-PFL: A soft-clustering mixture-of-experts framework for personalized federated
learning, Information Fusion 2026.

| paper | here |
|---|---|
| D_L, D_H | `--sensitive-fraction` or `--sensitive-column`; splits "train/low" and "train/high" |
| shared model on D_L | `train`: `client.model_choice.ChooseAndTrain` with `train.sensitivity=low` |
| g_i, unit length, PCA (Eq. 1-2) | the update of training: `clusterers.directions`; `cluster.explained_variance` |
| MCTC: K, τ (Alg. 1, Eq. 4) | `cluster.num_clusters`, `cluster.threshold`: `clusterers.OverlappingClusters` |
| validation (Eq. 3) | `cluster.validate`, `cluster.max_centre_similarity` |
| experts (Eq. 5), weights n_i = samples of D_L | `stages.overlapping`, `stages.train.TrainAndAggregate` |
| the most accurate expert is trained further | `train.validation_split`: on validation samples of low sensitivity |
| personal model on D_H | `personal`: trained when the fleet is evaluated, never sent |
| gate: s, prior, E, β, Top-2, p (Alg. 2) | `gate`: `client.gate.Gate`, trained on all samples of a client |

In the paper all clients train in every round: `--cohort 1.0`. A client is sent only the experts that it has not cached.

Ablations: `cluster.algorithm=kmeans` (without MCTC), `cluster.algorithm=one` (one global expert),
`components.gate=false` (the mean of a client's experts, without personal model and gate), `gate.calibrate=false`,
`gate.prior=uniform`, `gate.top`.

Deviations from the paper
-------------------------
- Gradients: they are the updates of several local steps, because no other gradients are available.
- Principal components: the paper gives no number m of them. Here they hold 95 % of the variance. Of an update with more
  than 2^18 numbers a random sketch is kept, which changes cosines by about 0.002.
- Seeds of clusters: a seed that would be a member of the cluster of an earlier seed is skipped, because two seeds
  otherwise often lie in one cluster. A low threshold then makes fewer clusters, not more overlap
  (`cluster.distinct_seeds=false` follows the paper).
- Failed validation: the paper does not say what follows it. Here the threshold rises by 0.1 up to 0.6, and then the
  number of clusters is reduced by one.
- Comparison of experts: the paper does not say on which samples. Here they are validation samples, on which nothing
  trains.
- Personal model: it starts from the client's best expert and is trained when it is needed. With `personal.start=cold`
  it starts from the first model that the client was sent and is trained in every round in which the client trains.
- Mixture: logits are mixed, not probabilities (`gate.mix`).
- Adam: its epsilon is 1e-4, so that fleets agree.
- Shortlist: of more than `gate.shortlist` experts the gate runs only those with the largest priors, so that a
  prediction does not cost as many models as there are clusters (`gate.shortlist=0` runs all, as Alg. 2 does).
- Clients without a gate for the experts that they are served, such as unseen clients: they weigh the experts by their
  confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import HasOptions, Method, option

PIECES = {"represent": "updates", "cluster": "mctc", "personalise": "gate"}
DEFAULTS = {"train": {"sensitivity": "low"}, "personal": {"sensitivity": "high"}}


@dataclass(frozen=True)
class Components(HasOptions):
    """Option that leaves the gate and the personal model out."""

    group: ClassVar[str] = "components"
    gate: bool = option(
        True, "Train a personal model and a gate. With false clients predict with the mean of their experts."
    )


def scmoe(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    gate = setting.make("components", Components).gate
    return compose(setting, "scmoe", PIECES if gate else PIECES | {"personalise": "none"}, DEFAULTS)
