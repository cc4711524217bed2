"""What a run had spent by each of its rounds, and the accuracy that this bought.

The joules of clients are modelled, from rounds.jsonl. Those of the server, for planning and averaging, are the seconds
that its processor worked times assumed watts; where there are edges, their link to the cloud counts with it.

Accuracy counts where it is held for some evaluated rounds in a row, as in R. Pereira, F. Famá, C. Kalalas and P. Dini,
"Energy-Efficient Federated Learning for AIoT using Clustering Methods", Tables I and II.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, stdev

from shoal.errors import UserError
from shoal.store.reader import RunRecord, runs_by_job

JOULE_PARTS = ("train", "pre", "comm", "server")  # as a bar stacks them
JOULE_PART_NAMES = {"train": "training", "pre": "preparation", "comm": "communication", "server": "server"}
JOULES_SCOPES = ("all", "clients")
SUSTAINED_ROUNDS = 20
MIN_SUSTAINED_ROUNDS = 3
ACCURACY_KEYS = {"central": "central", "local": "mean"}  # what users call them, and what rounds.jsonl does
ACCURACY_DESCRIPTIONS = {"central": "on the central test set", "mean": "mean over the clients’ own test sets"}


@dataclass(frozen=True)
class CurvePoint:
    """The end of one round."""

    round: int
    accuracy: float | None  # None: not evaluated
    joules_by_part: Mapping[str, float]  # joules from the first round on
    sim_s: float  # by the simulated clock

    @property
    def joules(self) -> float:
        return sum(self.joules_by_part.values())


@dataclass(frozen=True)
class ReachedAccuracy:
    """The end of the first window of rounds that held an accuracy."""

    round: int
    joules: float
    joules_by_part: Mapping[str, float]
    sim_s: float


@dataclass(frozen=True)
class Spread:
    """A number over the seeds of a job, those that have it."""

    mean: float
    std: float | None  # of the sample (n − 1); None: one seed
    num_values: int
    num_seeds: int  # seeds of the job

    @property
    def is_complete(self) -> bool:
        return self.num_values == self.num_seeds


def spread_over_seeds(values: Sequence[float | None]) -> Spread | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known), len(values))


def has_joules(run: RunRecord) -> bool:
    return any(line.get("joules") for line in run.rounds)


def parse_accuracy(flag: str, text: str | None) -> str | None:
    if text is not None and text not in ACCURACY_KEYS:
        raise UserError(f"{flag} is {text!r}; it must be central or local")
    return ACCURACY_KEYS[text] if text else None


def parse_joules_scope(flag: str, text: str) -> str:
    if text not in JOULES_SCOPES:
        raise UserError(f"{flag} is {text!r}; it must be all, or clients to leave the server's joules out")
    return text


def effective_accuracy_key(run: RunRecord) -> str:
    """Which accuracy a run is judged by, a key of OF_ACCURACY: unless that is said, central if it has one."""
    if run.accuracy_key:
        return run.accuracy_key
    return "central" if any(line["accuracy"].get("central") is not None for line in run.evaluated_rounds) else "mean"


def cost_curve(run: RunRecord) -> list[CurvePoint]:
    """All rounds in order, with the joules of everything up to each of them."""
    accuracy_key, includes_server = effective_accuracy_key(run), run.joules_scope == "all"
    watts, server_s = _server_watts(run), {line["round"]: line.get("server_s", 0.0) for line in run.timing}
    parts, sim_s = dict.fromkeys(JOULE_PARTS, 0.0), 0.0
    points = []
    for line in run.rounds:
        round_joules = dict(line.get("joules") or {})
        round_joules["server"] = (
            watts * server_s.get(line["round"], 0.0) + round_joules.get("long", 0.0) if includes_server else 0.0
        )
        parts = {part: joules + round_joules.get(part, 0.0) for part, joules in parts.items()}
        sim_s += line.get("sim_time_s", 0.0)
        accuracy = (line.get("accuracy") or {}).get(accuracy_key)
        known = accuracy is not None and isfinite(accuracy)
        points.append(CurvePoint(line["round"], accuracy if known else None, parts, sim_s))
    return points


def server_joules_fraction(run: RunRecord) -> float:
    """Of all joules of the run."""
    last = cost_curve(run)[-1] if run.rounds else None
    return last.joules_by_part["server"] / last.joules if last and last.joules else 0.0


def default_sustained_rounds(runs: Sequence[RunRecord]) -> int:
    """For how many evaluated rounds accuracy counts as held unless that is said: a quarter of the shortest run's, so
    that short runs hold something, within limits."""
    shortest = min((len(run.evaluated_rounds) for _, group in runs_by_job(runs) for run in group), default=0)
    return min(SUSTAINED_ROUNDS, max(MIN_SUSTAINED_ROUNDS, shortest // 4))


def cost_to_accuracy(
    run: RunRecord, target_accuracy: float, sustained_rounds: int = SUSTAINED_ROUNDS
) -> ReachedAccuracy | None:
    """When accuracy had been at `level` or above for `held` evaluated rounds in a row, and what it took till then."""
    end = _first_sustained_point(run, target_accuracy, sustained_rounds)
    return ReachedAccuracy(end.round, end.joules, end.joules_by_part, end.sim_s) if end else None


def _first_sustained_point(run: RunRecord, target_accuracy: float, sustained_rounds: int) -> CurvePoint | None:
    return next((end for end, lowest in _sustained_windows(run, sustained_rounds) if lowest >= target_accuracy), None)


def accuracy_at_budget(
    run: RunRecord, budget_joules: float | None, sustained_rounds: int = SUSTAINED_ROUNDS
) -> float | None:
    """The highest accuracy that was held for `held` evaluated rounds in a row before `joules` were spent. None: these
    are not known."""
    if budget_joules is None:
        return None
    return max(
        (lowest for end, lowest in _sustained_windows(run, sustained_rounds) if end.joules <= budget_joules),
        default=None,
    )


def final_accuracy(run: RunRecord, num_rounds: int = SUSTAINED_ROUNDS) -> float | None:
    """The mean of the last `held` evaluated rounds, or of all if there are fewer."""
    known = [p.accuracy for p in cost_curve(run) if p.accuracy is not None]
    return fmean(known[-num_rounds:]) if known else None


def final_metric(run: RunRecord, name: str, num_rounds: int = SUSTAINED_ROUNDS) -> float | None:
    """The mean of the last `held` rounds that have this figure, such as train.silhouette."""
    known = [line["metrics"][name] for line in run.rounds if name in line.get("metrics", {})]
    return fmean(known[-num_rounds:]) if known else None


def common_accuracy(runs: Sequence[RunRecord], sustained_rounds: int = SUSTAINED_ROUNDS) -> float | None:
    """The highest whole percent that every run reached and held."""
    best = [accuracy_at_budget(run, inf, sustained_rounds) for run in runs]
    lowest = min((b if b is not None else 0.0 for b in best), default=0.0)
    return next((percent / 100 for percent in range(100, 0, -1) if percent / 100 <= lowest), None)


@dataclass(frozen=True)
class EnergyBreakdown:
    """What a job took, mean over its seeds: to the level that all jobs have in common, or the whole run."""

    label: str
    num_seeds: int
    is_finished: bool
    joules_by_part: Mapping[str, float]
    mean_rounds: float
    whole_joules: float

    @property
    def joules(self) -> float:
        return sum(self.joules_by_part.values())


def energy_breakdowns(
    runs: Sequence[RunRecord], sustained_rounds: int = SUSTAINED_ROUNDS
) -> tuple[float | None, list[EnergyBreakdown]]:
    """The common level (None: there is none, so these are of whole runs) and a bill for every job."""
    groups = runs_by_job(runs)
    level = common_accuracy([run for _, group in groups for run in group], sustained_rounds)
    return level, [_energy_breakdown(label, group, level, sustained_rounds) for label, group in groups]


def _energy_breakdown(
    label: str, runs: Sequence[RunRecord], target_accuracy: float | None, sustained_rounds: int
) -> EnergyBreakdown:
    last = [cost_curve(run)[-1] for run in runs]
    reached = [
        None if target_accuracy is None else _first_sustained_point(run, target_accuracy, sustained_rounds)
        for run in runs
    ]
    ends = [r or p for r, p in zip(reached, last, strict=True)]
    return EnergyBreakdown(
        label,
        len(runs),
        runs[0].is_finished,
        {part: fmean(end.joules_by_part[part] for end in ends) for part in JOULE_PARTS},
        fmean(end.round for end in ends),
        fmean(p.joules for p in last),
    )


def _sustained_windows(run: RunRecord, sustained_rounds: int) -> Iterator[tuple[CurvePoint, float]]:
    """The last point and the lowest accuracy of every `held` evaluated rounds in a row."""
    known = [(p, p.accuracy) for p in cost_curve(run) if p.accuracy is not None]
    for stop in range(sustained_rounds, len(known) + 1):
        window = known[stop - sustained_rounds : stop]
        yield window[-1][0], min(accuracy for _, accuracy in window)


def _server_watts(run: RunRecord) -> float:
    server_joules = (run.result or {}).get("joules_of_server")
    if server_joules:
        return float(server_joules["watts"])
    from shoal.cost.devices import PROFILES  # imports torch, which takes seconds

    return PROFILES["server"].active_w
