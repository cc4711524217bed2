"""Choice by how clients' losses move together (FedCor): surveys of all losses, and picks from what they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.selectors.choice import uniform
from shoal.selectors.correlation import LossCorrelation, pick
from shoal.stages.base import OneProgram, ServerOnly
from shoal.stages.table import Table
from shoal.types import FIXED, ClientId, ClientProgram, ModelsFor, Plan, Report, ServerState, Task

SURVEY = "survey"
NEVER = -2  # no round is the next one


@dataclass(frozen=True)
class Survey(OneProgram):
    """Everybody tells the loss of the global model, in rounds that follow each other in pairs: the difference is what
    the first round's training changed. In every round of the warm-up and at its end, then in pairs every so often."""

    program: ClientProgram
    models_for: ModelsFor
    warmup: int = 10
    every: int = 10
    history: int = 20  # changes that are kept
    name: str = SURVEY

    def __post_init__(self) -> None:
        for key, least in (("warmup", 1), ("every", 1), ("history", 1)):
            if getattr(self, key) < least:
                raise UserError(f"{self.name}.{key} is {getattr(self, key)}; it must be {least} or more")

    def due(self, round: int) -> bool:
        past = round - self.warmup
        return past <= 0 or past % self.every in (0, self.every - 1)

    def plan(self, state: ServerState, seed: int) -> Plan:
        return Plan(
            self.program,
            {c: Task(self.models_for(state, c), {}, derive_seed(seed, c)) for c in state.roster},
        )

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        before = Table.load(state, self.name)
        told = {c: (r.metrics["loss"][0] / r.metrics["loss"][1], r) for c, r in reports.items() if r.metrics["loss"][1]}
        blank = {
            "loss": torch.tensor(torch.nan, dtype=torch.float64),
            "round": torch.tensor(NEVER),
            "size": torch.tensor(0),
            "changes": torch.full((self.history,), torch.nan, dtype=torch.float64),
        }
        known = Table.of({c: blank for c in told if c not in set(before.clients)}).merged(before)
        rows = {}
        for i, c in enumerate(known.clients):
            old = {k: v[i] for k, v in known.columns.items()}
            loss, report = told.get(c, (torch.nan, None))
            paired = bool(report) and int(old["round"]) == state.round - 1
            change = torch.tensor([loss - float(old["loss"]) if paired else torch.nan], dtype=torch.float64)
            rows[c] = {**old, "changes": torch.cat([old["changes"][1:], change])}
            if report:
                heard = {"loss": loss, "round": state.round, "size": report.counts["train"]}
                rows[c] |= {k: torch.tensor(v, dtype=old[k].dtype) for k, v in heard.items()}
        return replace(state, memory={**state.memory, self.name: Table.of(rows).tree()})


@dataclass(frozen=True)
class Correlated(ServerOnly):
    """Random clients in the warm-up; then those who, by the correlation of all losses, lower them most."""

    size: int = field(metadata=FIXED)
    survey: Survey
    beta: float = 0.9  # how much a client counts after each time it was chosen, until the next survey
    forget: float = 0.95  # how much a change counts for each survey that came after it
    dimension: int = 15
    noise: float = 0.01
    name: str = "select"

    def __post_init__(self) -> None:
        for key in ("beta", "forget"):
            if not 0 < getattr(self, key) <= 1:
                raise UserError(f"{self.name}.{key} is {getattr(self, key)}; it must be above 0 and at most 1")

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        surveyed = Table.load(state, SURVEY)
        heard = np.isfinite(surveyed["changes"].numpy()) if len(surveyed) else np.zeros((0, 0))
        if state.round < self.survey.warmup or not heard.any():
            rows = uniform(np.arange(len(state.roster)), self.size, seed)
            return replace(state, cohort=tuple(state.roster[i] for i in rows.tolist()))
        trained = Table.load(state, self.name)
        if trained.clients != surveyed.clients or (self.survey.due(state.round) and heard[:, -1].any()):
            trained = self._trained(surveyed)
        x, chosen = trained["embedding"].numpy(), trained["chosen"].numpy().copy()
        covariance = x @ x.T + self.noise**2 * np.eye(len(x))
        sizes = surveyed["size"].double().numpy()
        here = surveyed.present(state.roster)
        rows = pick(covariance, sizes / max(1.0, sizes.sum()), here, self.size, self.beta**chosen)
        chosen[rows] += 1
        kept = Table(trained.clients, {**trained.columns, "chosen": torch.from_numpy(chosen)})
        return replace(state, cohort=surveyed.named(rows), memory={**state.memory, self.name: kept.tree()})

    def _trained(self, surveyed: Table) -> Table:
        changes = surveyed["changes"].numpy().T  # [surveys, clients]
        ages = np.arange(len(changes))[::-1]
        heard = np.isfinite(changes).any(axis=1)
        model = LossCorrelation(self.dimension, self.noise).fit(changes[heard], self.forget ** ages[heard])
        columns = {
            "embedding": torch.from_numpy(model.embedding_),
            "chosen": torch.zeros(len(surveyed), dtype=torch.int64),
        }
        return Table(surveyed.clients, columns)
