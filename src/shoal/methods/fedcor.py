"""FedCor: clients are selected by how the losses of all clients move together, which is learned from surveys.

Tang et al., FedCor: correlation-based active client selection strategy for heterogeneous federated learning, CVPR 2022;
a baseline of Pereira et al. 2025 (Sec. V-A, App. A).

| paper | here |
|---|---|
| warm-up of 10 rounds with random clients | `survey.warmup` |
| loss changes of all clients | `stages.loss_correlation.SurveyLosses`, charged as preparation |
| Gaussian process, linear kernel, maximum likelihood | `selectors.loss_correlation.LossCorrelation` |
| annealing β = 0.9 | `select.beta` |
| Δt rounds between trainings of the process | `survey.every_rounds` |

Deviations from the paper
-------------------------
- Gaussian process: it is trained in closed form (see `selectors.loss_correlation`).
- Surveys: a loss change takes two surveys, one before and one after a round. In the warm-up every survey serves as the
  end of one change and the start of the next.
- Rounds with a survey: the authors let random clients train a copy of the model for the survey and discard it. Here
  that round is an ordinary round with random clients, which costs less.
"""

from __future__ import annotations

from shoal.client.probe import LossProbe
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.loss_correlation import SURVEY, SelectByLossCorrelation, SurveyLosses
from shoal.types import Method


def fedcor(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    survey = setting.make(SURVEY, SurveyLosses, program=LossProbe(setting.model), models_for=one_model_for)
    return one_model_method(setting, "fedcor", survey, setting.make("select", SelectByLossCorrelation, survey=survey))
