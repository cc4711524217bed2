"""APCSMA: clients are selected and weighted by their contributions, and each client keeps a personal model.

Ma, Ma, Liu, Qi, APCSMA: adaptive personalized client-selection and model-aggregation algorithm for federated learning
in edge computing scenarios, Entropy 26, 2024.

| paper | here |
|---|---|
| num, epoch, acc, loss of a client (Eq. 1 to 3) | reported after training: `client.training_metrics` |
| log normalisation (Eq. 5 to 8), W_num (Eq. 9) | `selectors.contribution` |
| selection F1 (Eq. 10, Alg. 1), nc · jr clients | `stages.contribution.SelectByContribution`; `--cohort` |
| coefficients α, β, γ, η (Eq. 11) | `stages.contribution.Coefficients`: `coefficients.steps`, `coefficients.lr` |
| D_share | `share.source`: public (`--public-samples`), clients (`share.num_samples` of each, as in the paper), none |
| aggregation F2 (Eq. 12, 13, Alg. 2) | `stages.contribution.AggregateByContribution` |
| cosines of base and head (Eq. 14, 15) | `components.aggregation=cosine`; the head is the last layer |
| conditional update (Eq. 16, Alg. 3), κ | `client.conditional_update`; `update.kappa`, `update.schedule` |
| terminal, edge, cloud (Fig. 1) | `--edges`, with any method: every edge selects and weights its own clients |
| F1, F1_F2, F1_F2_cos (Table 1) | `components.aggregation`, without `components.conditional_update` |

Every metric is normalised over the clients that are compared. Each column of metrics therefore sums to 1, and so do the
contributions, because the coefficients are on the simplex. Coefficients start from 1/4 (1/6 with cosines) in every
round. Selected clients train their personal models. The server sees a personal model only as the report of that
training. A client is served its personal model, and an unseen client is served the global model. The server keeps the
last report of every client, which takes clients × parameters × 4 bytes.

Deviations from the paper
-------------------------
- D_share: the paper takes labelled samples of clients, which defeats the purpose of federated learning. Here the
  default is 50 public samples, which are taken out of the data before they are divided among the clients. Samples of
  clients are used only with `share.source=clients`. Without samples the coefficients stay equal. The result states
  which samples were used.
- First round: all clients train in it (`select.start=warm`), because the server needs a model of every client to mix.
  With `select.start=cold` a client that has not trained is represented by the model with which it was first measured.
  The learned coefficients then avoid such clients, and most of them are never selected. The paper does not say what
  represents them.
- Late-joining clients: a client trains in the round in which it joins.
- Clients outside the cohort: the server mixes the last model that they sent. Their models after Eq. 16 stay private.
- Loss (Eq. 3): it is the mean over a client's samples, not the sum. The sum would weight the samples a second time, in
  the opposite direction.
- κ: it is constant or follows a schedule. The paper adapts it to the performance of the model, but does not say how.
- Coefficients: they are the softmax of numbers that 10 steps of Adam with learning rate 0.1 optimise, because 10 steps
  of SGD at the learning rate of the paper's training change nothing. They stay equal if the loss rises in these steps.
- Cosines that are negative or all equal: see `selectors.contribution.lognorm`.
- Comparison of Eq. 16: accuracies are measured on the client's validation samples, on which it does not train (with
  `update.validation_split=train` on its training samples). A client without such samples takes the global model.
- Metrics: they are measured on training samples, in the paper on test samples.
- Sensitive samples: with `train.sensitivity=low` all of this uses samples of low sensitivity only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import HasOptions, Method, option


@dataclass(frozen=True)
class Components(HasOptions):
    """Options that leave components of the method out. The other components are those of FedAvg."""

    group: ClassVar[str] = "components"
    selection: Literal["contribution", "random"] = option(
        "contribution", "Select the clients with the largest contribution F1, or random clients."
    )
    aggregation: Literal["cosine", "contribution", "size"] = option(
        "cosine",
        "Weight models by contribution and direction (cosine), by contribution F2, or by numbers of samples (size).",
    )
    conditional_update: bool = option(
        True,
        "Let every client keep a personal model, into which it mixes the global model if the personal one is better.",
    )

    @property
    def pieces(self) -> dict[str, str]:
        """Returns the pieces of the method, by step."""
        return {
            "select": self.selection,
            "aggregate": "mean" if self.aggregation == "size" else self.aggregation,
            "personalise": "update" if self.conditional_update else "none",
        }


def apcsma(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return compose(setting, "apcsma", setting.make("components", Components).pieces)
