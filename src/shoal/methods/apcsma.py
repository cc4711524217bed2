"""APCSMA: clients are chosen and weighed by what they contribute; each keeps some of its own model where it is better.

Ma, Ma, Liu, Qi, APCSMA: adaptive personalized client-selection and model-aggregation algorithm for federated learning
in edge computing scenarios, Entropy 26, 2024.

| paper | here |
|---|---|
| num, epoch, acc, loss of a client (Eq. 1 to 3) | reported after training: `client.training_metrics` |
| log normalisation (Eq. 5 to 8), W_num (Eq. 9) | `selectors.contribution` |
| selection F1 (Eq. 10, Alg. 1), nc · jr clients | `stages.contribution.ByContribution`; `--cohort` |
| coefficients α, β, γ, η (Eq. 11) | `stages.contribution.Coefficients`: `learn.steps`, `learn.lr` |
| D_share | `share.rows_of`: public (`--public`), clients (`share.rows` of each, as in the paper) or nobody |
| aggregation F2 (Eq. 12, 13, Alg. 2) | `stages.contribution.FederateByContribution` |
| cosines of base and head (Eq. 14, 15) | `components.aggregation=cosine`; the head is the last layer |
| conditional update (Eq. 16, Alg. 3), κ | `client.conditional_update`; `update.kappa`, `update.schedule` |
| terminal, edge, cloud (Fig. 1) | any method has it: `--edges`, each of which then chooses and weighs by itself |
| F1, F1_F2, F1_F2_cos (Table 1) | `components.aggregation`, without `components.conditional_update` |

Every metric is taken over those who are compared, so that each column of metrics, and with coefficients on the simplex
the contributions too, sum to 1. Coefficients start from 1/4 (1/6) in every round. Selected clients train from their own
models, which nobody else sees but as what they send; what a client is served is its own model, an unseen client is
served the global one. The server keeps what everybody sent last: clients × parameters × 4 bytes.

Deviation: the paper's D_share is made of clients' rows, with labels, which gives away what federated learning is there
to keep; here rows that nobody holds are the default (50 of them, taken out of the data before they are dealt), and
clients' rows are used only where `share.rows_of=clients` says so. Without any, coefficients stay equal. The result says
which it was.

Deviation: in the first round everybody takes part (`select.start=warm`), for the server must have a model of everybody
to mix. With `cold` clients that never took part are represented by the model that they were first measured with; then
coefficients that avoid them are learned, and most clients are never asked. The paper does not say what stands for them.
A newcomer takes part in the round in which it comes. Of clients that are not chosen, the server mixes what they last
sent: what they hold after Eq. 16 stays with them.

Deviation: a client's loss is the mean over its rows, not the sum (Eq. 3), which would weigh its rows a second time and
the other way round. κ is fixed or follows a schedule; the paper would adjust it to the model's performance and does not
say how.

Deviation: coefficients are the softmax of numbers found by 10 steps of Adam at 0.1, for 10 steps of SGD at the rate of
the paper's training change nothing. Where the steps end above the loss they began with, coefficients stay equal. For
the cosine of a negative sign, or all alike, see `selectors.contribution.lognorm`.

Deviation: accuracies for Eq. 16 are compared on the client's validation rows, which it does not train on
(`update.judge=train`: on its training rows); without such rows it takes the global model. Metrics are those of training
rows; the paper's are of test rows. With `train.rows=low` all of this is of rows of low sensitivity only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import HasOptions, Method, option


@dataclass(frozen=True)
class Components(HasOptions):
    """What of the method is used; the rest is FedAvg."""

    group: ClassVar[str] = "components"
    selection: Literal["contribution", "random"] = option(
        "contribution", "Select the clients with the largest contribution F1, or random clients."
    )
    aggregation: Literal["cosine", "contribution", "size"] = option(
        "cosine",
        "Weight models by contribution and direction (cosine), by contribution F2 alone, or by their samples (size).",
    )
    conditional_update: bool = option(
        True, "Let every client keep a model of its own and mix the global model into it where its own is worse."
    )

    @property
    def pieces(self) -> dict[str, str]:
        return {
            "select": self.selection,
            "aggregate": "mean" if self.aggregation == "size" else self.aggregation,
            "personalise": "update" if self.conditional_update else "none",
        }


def apcsma(setting: Setting) -> Method:
    return compose(setting, "apcsma", setting.make("components", Components).pieces)
