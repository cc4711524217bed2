"""FedCor: clients chosen by how all clients' losses move together, learned from surveys.

Tang et al., FedCor: correlation-based active client selection strategy for heterogeneous federated learning,
CVPR 2022; a baseline of paper 002 (Sec. V-A, App. A).

| paper | here |
|---|---|
| warm-up of 10 rounds with random clients | `survey.warmup` |
| loss changes of all clients | `stages.loss_correlation.Survey`: `client.probe.LossProbe`, charged as preparation |
| Gaussian process, linear kernel, maximum likelihood | `selectors.loss_correlation.LossCorrelation` |
| annealing β = 0.9 | `select.beta` |
| Δt rounds between trainings of the process | `survey.every` |

Deviation: the process is trained in closed form (see `selectors.loss_correlation`). A change takes two surveys, before
and after a round; in the warm-up each serves for two. The authors let random clients train a copy of the model for the
survey and throw it away; here that round is an ordinary one with random clients, which costs less.
"""

from __future__ import annotations

from shoal.client.probe import LossProbe
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.loss_correlation import SURVEY, SelectByLossCorrelation, SurveyLosses
from shoal.types import Method


def fedcor(setting: Setting) -> Method:
    survey = setting.make(SURVEY, SurveyLosses, program=LossProbe(setting.model), models_for=one_model_for)
    return one_model_method(setting, "fedcor", survey, setting.make("select", SelectByLossCorrelation, survey=survey))
