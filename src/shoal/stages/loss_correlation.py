"""Selection by the correlation of the clients' losses (FedCor), which surveys of all losses measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from shoal.client_table import ClientTable
from shoal.rng import derive_seed
from shoal.selectors.loss_correlation import LossCorrelation, pick
from shoal.selectors.sampling import sample_uniformly
from shoal.stages.base import OneProgram, ServerOnly
from shoal.types import (
    ClientId,
    ClientProgram,
    HasOptions,
    ModelsFor,
    Plan,
    Report,
    Rounds,
    Schedule,
    ServerState,
    Task,
    option,
)

SURVEY = "survey"
NEVER = -2  # a round that no later round follows directly


@dataclass(frozen=True)
class SurveyLosses(OneProgram, HasOptions):
    """Surveys the losses of all clients under the global model, in pairs of consecutive rounds.

    The difference between the losses of a pair is the effect of the first round's training. Losses are surveyed in
    every round of the warm-up and at its end, and then in one pair every `every_rounds` rounds.
    """

    program: ClientProgram
    models_for: ModelsFor
    warmup: int = option(
        10, "Select clients at random and survey the losses of all clients in each of this many first rounds.", ge=1
    )
    every_rounds: int = option(
        10,
        "After the warm-up, survey all losses before and after one round of training each time this many rounds have "
        "passed.",
        ge=1,
    )
    history: int = option(20, "Learn how losses move together from this many of the latest loss changes.", ge=1)
    name: str = SURVEY

    @property
    def schedule(self) -> Schedule:
        if self.every_rounds <= 2:  # pairs follow each other without a gap
            return Schedule("all")
        next_pair = self.warmup + self.every_rounds - 1
        pairs = Rounds(next_pair, self.every_rounds), Rounds(next_pair + 1, self.every_rounds)
        return Schedule("all", (Rounds(0, 1, last=self.warmup), *pairs))

    def begins_pair(self, round_index: int) -> bool:
        """Whether the next round is also surveyed, so that the effect of this round's training becomes known."""
        return round_index < self.warmup or (round_index - self.warmup) % self.every_rounds == self.every_rounds - 1

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan(
            self.program,
            {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in state.roster},
        )

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        before = ClientTable.load(state, self.name)
        reported = {
            c: (r.metrics["loss"][0] / r.metrics["loss"][1], r) for c, r in reports.items() if r.metrics["loss"][1]
        }
        blank = {
            "loss": torch.tensor(torch.nan, dtype=torch.float64),
            "round": torch.tensor(NEVER),
            "size": torch.tensor(0),
            "changes": torch.full((self.history,), torch.nan, dtype=torch.float64),  # the newest comes last
            "when": torch.full((self.history,), NEVER),  # the round that made each change
        }
        clients_before = set(before.clients)
        surveyed = ClientTable.from_rows({c: blank for c in reported if c not in clients_before}).updated_with(before)
        if not len(surveyed):
            return state
        columns = {k: v.clone() for k, v in surveyed.columns.items()}
        losses = torch.tensor(
            [reported[c][0] if c in reported else torch.nan for c in surveyed.clients], dtype=torch.float64
        )
        has_reported = torch.tensor([c in reported for c in surveyed.clients])
        is_paired = has_reported & (columns["round"] == state.round - 1)
        if is_paired.any():
            change = torch.where(is_paired, losses - columns["loss"], torch.nan)
            columns["changes"] = torch.cat([columns["changes"][:, 1:], change[:, None]], dim=1)
            change_round = torch.full((len(surveyed), 1), state.round - 1)
            columns["when"] = torch.cat([columns["when"][:, 1:], change_round], dim=1)
        columns["loss"] = torch.where(has_reported, losses, columns["loss"])
        columns["round"] = torch.where(has_reported, state.round, columns["round"])
        sizes = torch.tensor([reported[c][1].counts["train"] if c in reported else 0 for c in surveyed.clients])
        columns["size"] = torch.where(has_reported, sizes, columns["size"])
        return replace(state, memory={**state.memory, self.name: ClientTable(surveyed.clients, columns).to_tree()})


@dataclass(frozen=True)
class SelectByLossCorrelation(ServerOnly, HasOptions):
    """Selects the clients that reduce the losses of all clients most, according to their correlation.

    In the warm-up and in rounds whose effect is surveyed, the selection is random.
    """

    survey: SurveyLosses
    beta: float = option(
        0.9, "Multiply a client's score by this factor each time it is selected, until the next survey.", gt=0, le=1
    )
    age_discount: float = option(
        0.95, "Multiply the weight of a loss change by this factor for each round that has passed since.", gt=0, le=1
    )
    dimension: int = option(15, "Describe each client by a vector of this length in the Gaussian process.", ge=1)
    noise: float = option(
        0.01, "The Gaussian process assumes this standard deviation of noise in surveyed loss changes.", gt=0
    )
    name: str = "select"

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        surveyed = ClientTable.load(state, SURVEY)
        is_surveyed = np.isfinite(surveyed["changes"].numpy()) if len(surveyed) else np.zeros((0, 0))
        if self.survey.begins_pair(state.round) or not is_surveyed.any():
            selected = sample_uniformly(np.arange(len(state.roster)), state.cohort_size, seed)
            return replace(state, cohort=tuple(state.roster[i] for i in selected.tolist()))
        fitted = ClientTable.load(state, self.name)
        if fitted.clients != surveyed.clients or int(surveyed["when"][0, -1]) == state.round - 1:
            fitted = self._fitted(surveyed, state.round)
        x, num_selections = fitted["embedding"].numpy(), fitted["chosen"].numpy().copy()
        covariance = x @ x.T + self.noise**2 * np.eye(len(x))
        sizes = surveyed["size"].double().numpy()
        is_present = surveyed.is_present(state.roster)
        selected = pick(
            covariance, sizes / max(1.0, sizes.sum()), is_present, state.cohort_size, self.beta**num_selections
        )
        num_selections[selected] += 1
        remembered = ClientTable(fitted.clients, {**fitted.columns, "chosen": torch.from_numpy(num_selections)})
        return replace(
            state, cohort=surveyed.client_ids(selected), memory={**state.memory, self.name: remembered.to_tree()}
        )

    def _fitted(self, surveyed: ClientTable, round_index: int) -> ClientTable:
        changes = surveyed["changes"].numpy().T  # [surveys, clients]
        ages = round_index - 1 - surveyed["when"].numpy().max(axis=0)  # the rows of new clients have no rounds
        has_values = np.isfinite(changes).any(axis=1)
        model = LossCorrelation(self.dimension, self.noise).fit(
            changes[has_values], self.age_discount ** ages[has_values]
        )
        columns = {
            "embedding": torch.from_numpy(model.embedding_),
            "chosen": torch.zeros(len(surveyed), dtype=torch.int64),
        }
        return ClientTable(surveyed.clients, columns)
