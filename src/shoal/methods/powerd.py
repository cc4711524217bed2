"""Power of choice: of some random clients, those with the largest loss take part.

Cho, Wang, Joshi, Client selection in federated learning: convergence analysis and power-of-choice selection
strategies, arXiv 2010.01243; a baseline of paper 002 (Sec. II-A).

| paper | here |
|---|---|
| d candidates, drawn with probability n_k/n without replacement | `select.candidates` (0: twice the cohort) |
| their losses at the global model | `client.probe.LossProbe`, charged as preparation |
| the K largest | `stages.select.LargestLoss` |

Deviation: the average is weighted by sizes, as paper 002 does for every method (Eq. 2); the authors' is plain, which is
`train.weighting=uniform`.
"""

from __future__ import annotations

from shoal.client.probe import LossProbe
from shoal.client.size import SendSampleCount
from shoal.errors import UserError
from shoal.methods.composition.model_functions import one_model_for
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import one_model_method
from shoal.stages.query import QueryClients
from shoal.stages.select import SIZE_STAGE, SelectLargestLoss
from shoal.types import Method


def powerd(setting: Setting) -> Method:
    choose = setting.make("select", SelectLargestLoss, program=LossProbe(setting.model), models_for=one_model_for)
    if choose.candidates and choose.candidates < setting.cohort_size:
        raise UserError(
            f"select.candidates is {choose.candidates}; it must be 0 or at least the cohort, {setting.cohort_size}"
        )
    return one_model_method(setting, "powerd", QueryClients(SendSampleCount(), name=SIZE_STAGE), choose)
