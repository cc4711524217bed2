"""The joules that a run has spent by the end of each round, and the accuracy that it has reached.

The joules of clients are modelled and come from rounds.jsonl. The joules of the server are the measured seconds that
its processor worked, times assumed watts. In a run with edge servers, the joules of the edge-cloud link count as the
server's.

Accuracy counts if it is sustained for some evaluated rounds in a row, as in R. Pereira, F. Famá, C. Kalalas and
P. Dini, "Energy-Efficient Federated Learning for AIoT using Clustering Methods", Tables I and II.

`comparison.py` and `plots.py` show what this module computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, stdev

from shoal.errors import UserError
from shoal.store.reader import RunRecord, runs_by_job

JOULE_PARTS = ("training", "preparation", "communication", "server")  # in the order in which a bar stacks them
JOULES_SCOPES = ("all", "clients")
SUSTAINED_ROUNDS = 20  # evaluated rounds
MIN_SUSTAINED_ROUNDS = 3
ACCURACY_KEYS = ("central", "local")
ACCURACY_DESCRIPTIONS = {
    "central": "central accuracy (on the central test set)",
    "local": "local accuracy (mean over the clients’ own test sets)",
}


@dataclass(frozen=True)
class CurvePoint:
    """The state of a run at the end of one round."""

    round: int
    accuracy: float | None  # None if the round was not evaluated
    joules_by_part: Mapping[str, float]  # from the first round on
    sim_s: float  # simulated time from the first round on

    @property
    def joules(self) -> float:
        """The joules of all parts from the first round on."""
        return sum(self.joules_by_part.values())


@dataclass(frozen=True)
class ReachedAccuracy:
    """The end of the first window of rounds in which an accuracy was sustained, and the cost until then."""

    round: int
    joules: float
    joules_by_part: Mapping[str, float]
    sim_s: float


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a number over the seeds of a job that have it."""

    mean: float
    std: float | None  # with n − 1; None if only one seed has the number
    num_values: int  # seeds that have the number
    num_seeds: int  # all seeds of the job

    @property
    def is_complete(self) -> bool:
        """Whether every seed has the number."""
        return self.num_values == self.num_seeds


def spread_over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Returns mean and deviation of one value per seed, or None if no seed has a value."""
    present = [v for v in values if v is not None]
    if not present:
        return None
    return Spread(fmean(present), stdev(present) if len(present) > 1 else None, len(present), len(values))


def has_joules(run: RunRecord) -> bool:
    """Returns whether any round of the run has joules."""
    return any(line.get("joules") for line in run.rounds)


def parse_accuracy(flag: str, text: str | None) -> str | None:
    """Returns the accuracy key that a user named, or None. Raises `UserError` for another word."""
    if text is not None and text not in ACCURACY_KEYS:
        raise UserError(f"{flag} is {text!r}. It must be central or local.")
    return text or None


def parse_joules_scope(flag: str, text: str) -> str:
    """Returns the scope of joules that a user named. Raises `UserError` for another word."""
    if text not in JOULES_SCOPES:
        raise UserError(f"{flag} is {text!r}. It must be all, or clients to exclude the server's joules.")
    return text


def effective_accuracy_key(run: RunRecord) -> str:
    """Returns the accuracy key of a run: the one that was chosen, else central if the run has a central accuracy."""
    if run.accuracy_key:
        return run.accuracy_key
    return "central" if any(line["accuracy"].get("central") is not None for line in run.evaluated_rounds) else "local"


def cost_curve(run: RunRecord) -> list[CurvePoint]:
    """Returns one point per round, in order. Joules and simulated time are sums from the first round on."""
    accuracy_key, includes_server = effective_accuracy_key(run), run.joules_scope == "all"
    watts, server_s = _server_watts(run), {line["round"]: line.get("server_s", 0.0) for line in run.timing}
    parts, sim_s = dict.fromkeys(JOULE_PARTS, 0.0), 0.0
    points = []
    for line in run.rounds:
        round_joules = dict(line.get("joules") or {})
        round_joules["server"] = (
            watts * server_s.get(line["round"], 0.0) + round_joules.get("cloud_link", 0.0) if includes_server else 0.0
        )
        parts = {part: joules + round_joules.get(part, 0.0) for part, joules in parts.items()}
        sim_s += line.get("sim_time_s", 0.0)
        accuracy = (line.get("accuracy") or {}).get(accuracy_key)
        is_valid = accuracy is not None and isfinite(accuracy)
        points.append(CurvePoint(line["round"], accuracy if is_valid else None, parts, sim_s))
    return points


def server_joules_fraction(run: RunRecord) -> float:
    """Returns the server's fraction of all joules of the run."""
    last = cost_curve(run)[-1] if run.rounds else None
    return last.joules_by_part["server"] / last.joules if last and last.joules else 0.0


def default_sustained_rounds(runs: Sequence[RunRecord]) -> int:
    """Returns the default number of evaluated rounds in a row for which an accuracy must be sustained.

    It is a quarter of the evaluated rounds of the shortest run, at least 3 and at most 20, so that short runs can
    sustain an accuracy too.
    """
    shortest = min((len(run.evaluated_rounds) for _, job_runs in runs_by_job(runs) for run in job_runs), default=0)
    return min(SUSTAINED_ROUNDS, max(MIN_SUSTAINED_ROUNDS, shortest // 4))


def cost_to_accuracy(
    run: RunRecord, target_accuracy: float, sustained_rounds: int = SUSTAINED_ROUNDS
) -> ReachedAccuracy | None:
    """Returns the end of the first `sustained_rounds` evaluated rounds in a row at `target_accuracy` or above.

    Returns None if the run has no such rounds.
    """
    end = _first_sustained_point(run, target_accuracy, sustained_rounds)
    return ReachedAccuracy(end.round, end.joules, end.joules_by_part, end.sim_s) if end else None


def _first_sustained_point(run: RunRecord, target_accuracy: float, sustained_rounds: int) -> CurvePoint | None:
    return next((end for end, lowest in _sustained_windows(run, sustained_rounds) if lowest >= target_accuracy), None)


def accuracy_at_budget(
    run: RunRecord, budget_joules: float | None, sustained_rounds: int = SUSTAINED_ROUNDS
) -> float | None:
    """Returns the highest accuracy that was sustained before the run had spent `budget_joules`.

    Returns None if no accuracy was sustained by then, or if the budget is None, which means unknown.
    """
    if budget_joules is None:
        return None
    return max(
        (lowest for end, lowest in _sustained_windows(run, sustained_rounds) if end.joules <= budget_joules),
        default=None,
    )


def final_accuracy(run: RunRecord, num_rounds: int = SUSTAINED_ROUNDS) -> float | None:
    """Returns the mean accuracy of the last `num_rounds` evaluated rounds, or of all of them if there are fewer."""
    accuracies = [p.accuracy for p in cost_curve(run) if p.accuracy is not None]
    return fmean(accuracies[-num_rounds:]) if accuracies else None


def final_metric(run: RunRecord, name: str, num_rounds: int = SUSTAINED_ROUNDS) -> float | None:
    """Returns the mean of a metric, such as train.silhouette, over the last `num_rounds` rounds that have it."""
    values = [line["metrics"][name] for line in run.rounds if name in line.get("metrics", {})]
    return fmean(values[-num_rounds:]) if values else None


def common_accuracy(runs: Sequence[RunRecord], sustained_rounds: int = SUSTAINED_ROUNDS) -> float | None:
    """Returns the highest whole percent of accuracy that every run sustained, or None if there is none."""
    best = [accuracy_at_budget(run, inf, sustained_rounds) for run in runs]
    lowest = min((b if b is not None else 0.0 for b in best), default=0.0)
    return next((percent / 100 for percent in range(100, 0, -1) if percent / 100 <= lowest), None)


@dataclass(frozen=True)
class EnergyBreakdown:
    """The joules of a job, as means over its seeds.

    They are counted until the accuracy that all jobs sustained, or for the whole run if there is no such accuracy.
    """

    label: str
    num_seeds: int
    is_finished: bool
    joules_by_part: Mapping[str, float]
    mean_rounds: float
    whole_joules: float  # of whole runs

    @property
    def joules(self) -> float:
        """The joules of all parts."""
        return sum(self.joules_by_part.values())


def energy_breakdowns(
    runs: Sequence[RunRecord], sustained_rounds: int = SUSTAINED_ROUNDS
) -> tuple[float | None, list[EnergyBreakdown]]:
    """Returns the accuracy that all jobs sustained, or None, and the energy breakdown of every job."""
    jobs = runs_by_job(runs)
    target = common_accuracy([run for _, job_runs in jobs for run in job_runs], sustained_rounds)
    return target, [_energy_breakdown(label, job_runs, target, sustained_rounds) for label, job_runs in jobs]


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
    """Yields the last point and the lowest accuracy of every `sustained_rounds` evaluated rounds in a row."""
    evaluated = [(p, p.accuracy) for p in cost_curve(run) if p.accuracy is not None]
    for stop in range(sustained_rounds, len(evaluated) + 1):
        window = evaluated[stop - sustained_rounds : stop]
        yield window[-1][0], min(accuracy for _, accuracy in window)


def _server_watts(run: RunRecord) -> float:
    server_joules = (run.result or {}).get("server_joules")
    if server_joules:
        return float(server_joules["watts"])
    from shoal.cost.devices import PROFILES  # imports torch, which takes seconds

    return PROFILES["server"].active_w
