"""Power of choice: of some random candidates, the clients with the largest loss form the cohort.

Cho, Wang, Joshi, Client selection in federated learning: convergence analysis and power-of-choice selection strategies,
arXiv 2010.01243; a baseline of Pereira et al. 2025 (Sec. II-A).

| paper | here |
|---|---|
| d candidates, drawn with probability n_k/n without replacement | `select.candidates` (0: twice the cohort) |
| their losses at the global model | `client.probe.LossProbe`, charged as preparation |
| the K largest | `stages.select.SelectLargestLoss` |

Deviations from the paper
-------------------------
- Weights: the mean is weighted by numbers of samples, as in Pereira et al. 2025 (Eq. 2). The authors' mean is plain,
  which is `train.weighting=uniform`.
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
    """Builds the method with the options of the setting."""
    select = setting.make("select", SelectLargestLoss, program=LossProbe(setting.model), models_for=one_model_for)
    if select.candidates and select.candidates < setting.cohort_size:
        raise UserError(
            f"select.candidates is {select.candidates}; it must be 0 or at least the cohort size, {setting.cohort_size}"
        )
    return one_model_method(setting, "powerd", QueryClients(SendSampleCount(), name=SIZE_STAGE), select)
