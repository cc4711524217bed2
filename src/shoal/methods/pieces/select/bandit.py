"""A bandit over sets of clients within a time budget, as in FedEPC."""

from __future__ import annotations

from shoal.client.probe import LossProbe
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import (
    CLUSTER_MODELS,
    INDIVIDUAL_UPDATES,
    UPDATE_SUMMARIES,
    VECTORS_BEFORE_TRAINING,
)
from shoal.methods.composition.piece import Piece, register
from shoal.stages.bandit import SelectByBandit
from shoal.stages.experts import expert_for
from shoal.stages.query import QueryClients


@register("select", "bandit")
class TimeBudgetBandit(Piece):
    """Selects, by a Gaussian-process bandit, a set of clients in every cluster that fits a time budget (CICS)."""

    source = "Tang et al. 2025 (FedEPC), Eq. 9-12, Alg. 3"
    requires = (CLUSTER_MODELS, VECTORS_BEFORE_TRAINING, UPDATE_SUMMARIES, INDIVIDUAL_UPDATES)
    requires_reason = "it selects a set in every cluster before training, by the updates of the last round"
    client_sends = "its loss on the model of its cluster"
    client_keeps = "the model of its cluster"
    server_learns = "losses, durations, and the norm of each client's update"
    remark = (
        "The time budget select.time_budget_fraction sets how many clients train in a round. "
        "The cohort size has no effect."
    )

    def add_to(self, method: MethodBuilder) -> None:
        select = method.setting.make("select", SelectByBandit)
        if select.uses_losses:
            probe, after = LossProbe(method.setting.model), method.first_sparsity_round
            method.stages["select"].append(
                QueryClients(probe, expert_for, every_rounds=1, first_round=after, name="probe")
            )
        method.stages["select"].append(select)
        method.uses_cohort_size = False
