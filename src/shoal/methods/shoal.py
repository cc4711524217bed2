"""shoal: a global model from balanced cohorts, a class prior for every client, and experts where a probe finds a shift.

This is the project's own method. Where clients differ only in how often classes occur, p(x|y) is shared, and one good
model with the prior of each client is the best predictor: clusters, fine-tuning and personal models do not help.
Clusters are for clients whose p(x|y) differs (conditional shift). The prior correction is that of Saerens et al.
(2002), the logit adjustment that of Menon et al. (2021), and the server momentum is FedAvgM (Hsu et al. 2019).

| component | here | without it |
|---|---|---|
| cohorts with flat label counts | `stages.balanced.SelectBalanced` | `components.selection=random` |
| server momentum β, server learning rate η | `stages.momentum.ApplyMomentum` | `server.momentum=0`, `server.lr=1` |
| EMA model, for serving only | `stages.momentum.UpdateEmaModels` | `server.ema_decay=0` |
| loss of logits + log prior, partly uniform | `client.prior.AdjustedTraining` | `train.logit_adjustment=off` |
| last layer averaged class by class, with that loss | `stages.global_and_experts` | `train.classwise_head=false` |
| logits + log (n_c + α) / (n + α C) - log training prior | `client.prior` | `components.prior_correction=false` |
| class prior of an unseen client, by EM | `estimate`: `client.prior.EstimatePrior` | without `--infer-from-inputs` |
| shift probe, experts, gate | `stages.shift_probe`, `client.expert_mixture` | `components.experts=false` |

Messages: clients report their label distributions (with noise and its ε if `represent.noise_scale` is set) and their
numbers of samples. In a probe they also report, for every class and either half of their samples, the number of samples
and the sum of their features in the global model of the first probe, and over all samples the sum of squared features.
If a class has one sample in a half, its features are reported as they are. These counts are exact, whatever noise is on
label distributions. The probe trains nothing. Label counts, an estimated prior and a gate stay with the client. When
clusters are split, the server learns which clients are similar, and clients train two models.

Changing data: every 20 rounds clients count and report their labels again, and the probe is repeated with the model of
the first probe, which clients have cached (`represent.every_rounds`, `prior.every_rounds`, `probe.every_rounds`; 0:
never). A client whose class means are nearer to those of another cluster is reassigned. A shift that begins later
is found by the next probe. A late-joining client has the global model, its prior once it has counted its labels, and an
expert after its first probe.

Logit adjustment: with `auto` the loss is adjusted if clients train for several epochs or the model has convolutions,
because clients then drift apart within a round.

Waiting time: half of a cohort (`select.waiting_fraction`) consists of the clients that have waited longest, and the
other half balances their labels. A present client waits at most N / (cohort / 2) rounds, in whatever cluster it is.

Deviations from the preceding study
-----------------------------------
- Server learning rate: it is 2 (`server.lr`). The preceding study used 1. The updates of cohorts with balanced labels
  agree more, so larger steps are possible.
- Class prior: the preceding study had (n_c + .1) / (n + 1), which is right for ten classes only. Here it is defined for
  any number of classes.
- Training prior: the server tracks the label distribution of the samples that trained each model
  (`stages.training_prior.TrackTrainingPrior`), and clients subtract its logarithm. Otherwise a model trained on
  unbalanced data would count this distribution twice. With the adjusted loss the training prior is an approximation.
- Shift probe: the probe of the preceding study split clients by the directions of their updates where a silhouette was
  above 0.05. Such directions follow labels more than shift. Here the probe compares p(x|y) itself, class by class.
- Threshold of the probe: a squared distance of a tenth of the variance within a class. It was fixed on Fashion-MNIST,
  seed 0 (docs/results.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shoal.methods.composition.compose import compose
from shoal.methods.composition.setting import Setting
from shoal.types import HasOptions, Method, option

REPORT_EVERY_ROUNDS = 20  # clients report their labels again after so many rounds, because their data may have changed


@dataclass(frozen=True)
class Components(HasOptions):
    """Options that leave components of the method out."""

    group: ClassVar[str] = "components"
    selection: Literal["balanced", "random"] = option(
        "balanced", "Select the cohort with the flattest summed label distribution, or random clients."
    )
    prior_correction: bool = option(True, "Correct the logits of every client by its class prior.")
    experts: bool = option(
        True, "Probe for a conditional shift between clients, and train experts and gates if there is one."
    )

    def pieces(self, adjusts_logits: bool) -> dict[str, str]:
        """Returns the pieces of the method, by step."""
        uses_label_distributions = self.selection == "balanced" or self.prior_correction or adjusts_logits
        return {
            "represent": "labels" if uses_label_distributions else "none",
            "cluster": "shift" if self.experts else "none",
            "select": self.selection,
            "train": "adjusted",
            "aggregate": "momentum",
            "personalise": "gate" if self.experts else "none",
            "serve": "average+prior" if self.prior_correction else "average",
        }


DEFAULTS: dict[str, dict[str, Any]] = {
    "represent": {"rerelease_threshold": 0.25, "every_rounds": REPORT_EVERY_ROUNDS},
    "prior": {"every_rounds": REPORT_EVERY_ROUNDS},
    "server": {"momentum": 0.7, "lr": 2.0, "ema_decay": 0.8},
}


def shoal(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    components = setting.make("components", Components)
    adjusts_logits = setting.options.get("train", {}).get("logit_adjustment") != "off"
    return compose(setting, "shoal", components.pieces(adjusts_logits), DEFAULTS)
