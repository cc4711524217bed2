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

PARTS = ("train", "pre", "comm", "server")  # as a bar stacks them
PART_NAMES = {"train": "training", "pre": "preparation", "comm": "communication", "server": "server"}
COUNTED = ("all", "clients")
HELD = 20
LEAST_HELD = 3
ACCURACIES = {"central": "central", "local": "mean"}  # what users call them, and what rounds.jsonl does
OF_ACCURACY = {"central": "on the central test set", "mean": "mean over the clients’ own test sets"}


@dataclass(frozen=True)
class Point:
    """The end of one round."""

    round: int
    accuracy: float | None  # None: not evaluated
    parts: Mapping[str, float]  # joules from the first round on
    sim_s: float  # by the simulated clock

    @property
    def joules(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Reached:
    """The end of the first window of rounds that held an accuracy."""

    round: int
    joules: float
    parts: Mapping[str, float]
    sim_s: float


@dataclass(frozen=True)
class Spread:
    """A number over the seeds of a job, those that have it."""

    mean: float
    std: float | None  # of the sample (n − 1); None: one seed
    seeds: int
    of: int  # seeds of the job

    @property
    def complete(self) -> bool:
        return self.seeds == self.of


def over_seeds(values: Sequence[float | None]) -> Spread | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known), len(values))


def has_joules(run: RunRecord) -> bool:
    return any(line.get("joules") for line in run.rounds)


def parse_accuracy(where: str, text: str | None) -> str | None:
    if text is not None and text not in ACCURACIES:
        raise UserError(f"{where} is {text!r}; it must be central or local")
    return ACCURACIES[text] if text else None


def parse_counted(where: str, text: str) -> str:
    if text not in COUNTED:
        raise UserError(f"{where} is {text!r}; it must be all, or clients to leave the server's joules out")
    return text


def accuracy_of(run: RunRecord) -> str:
    """Which accuracy a run is judged by, a key of OF_ACCURACY: unless that is said, central if it has one."""
    if run.accuracy_key:
        return run.accuracy_key
    return "central" if any(line["accuracy"].get("central") is not None for line in run.evaluated_rounds) else "mean"


def course(run: RunRecord) -> list[Point]:
    """All rounds in order, with the joules of everything up to each of them."""
    kind, all_count = accuracy_of(run), run.joules_scope == "all"
    watts, server_s = _server_watts(run), {line["round"]: line.get("server_s", 0.0) for line in run.timing}
    parts, sim_s = dict.fromkeys(PARTS, 0.0), 0.0
    points = []
    for line in run.rounds:
        spent = dict(line.get("joules") or {})
        spent["server"] = watts * server_s.get(line["round"], 0.0) + spent.get("long", 0.0) if all_count else 0.0
        parts = {part: joules + spent.get(part, 0.0) for part, joules in parts.items()}
        sim_s += line.get("sim_time_s", 0.0)
        accuracy = (line.get("accuracy") or {}).get(kind)
        known = accuracy is not None and isfinite(accuracy)
        points.append(Point(line["round"], accuracy if known else None, parts, sim_s))
    return points


def server_share(run: RunRecord) -> float:
    """Of all joules of the run."""
    last = course(run)[-1] if run.rounds else None
    return last.parts["server"] / last.joules if last and last.joules else 0.0


def usual_held(runs: Sequence[RunRecord]) -> int:
    """For how many evaluated rounds accuracy counts as held unless that is said: a quarter of the shortest run's, so
    that short runs hold something, within limits."""
    shortest = min((len(run.evaluated_rounds) for _, group in runs_by_job(runs) for run in group), default=0)
    return min(HELD, max(LEAST_HELD, shortest // 4))


def to_accuracy(run: RunRecord, level: float, held: int = HELD) -> Reached | None:
    """When accuracy had been at `level` or above for `held` evaluated rounds in a row, and what it took till then."""
    end = _reached(run, level, held)
    return Reached(end.round, end.joules, end.parts, end.sim_s) if end else None


def _reached(run: RunRecord, level: float, held: int) -> Point | None:
    return next((end for end, lowest in _windows(run, held) if lowest >= level), None)


def at_budget(run: RunRecord, joules: float | None, held: int = HELD) -> float | None:
    """The highest accuracy that was held for `held` evaluated rounds in a row before `joules` were spent. None: these
    are not known."""
    if joules is None:
        return None
    return max((lowest for end, lowest in _windows(run, held) if end.joules <= joules), default=None)


def final_accuracy(run: RunRecord, held: int = HELD) -> float | None:
    """The mean of the last `held` evaluated rounds, or of all if there are fewer."""
    known = [p.accuracy for p in course(run) if p.accuracy is not None]
    return fmean(known[-held:]) if known else None


def final_figure(run: RunRecord, name: str, held: int = HELD) -> float | None:
    """The mean of the last `held` rounds that have this figure, such as train.silhouette."""
    known = [line["metrics"][name] for line in run.rounds if name in line.get("metrics", {})]
    return fmean(known[-held:]) if known else None


def common_level(runs: Sequence[RunRecord], held: int = HELD) -> float | None:
    """The highest whole percent that every run reached and held."""
    best = [at_budget(run, inf, held) for run in runs]
    lowest = min((b if b is not None else 0.0 for b in best), default=0.0)
    return next((percent / 100 for percent in range(100, 0, -1) if percent / 100 <= lowest), None)


@dataclass(frozen=True)
class Bill:
    """What a job took, mean over its seeds: to the level that all jobs have in common, or the whole run."""

    label: str
    seeds: int
    finished: bool
    parts: Mapping[str, float]
    rounds: float
    whole_joules: float

    @property
    def joules(self) -> float:
        return sum(self.parts.values())


def bills(runs: Sequence[RunRecord], held: int = HELD) -> tuple[float | None, list[Bill]]:
    """The common level (None: there is none, so these are of whole runs) and a bill for every job."""
    groups = runs_by_job(runs)
    level = common_level([run for _, group in groups for run in group], held)
    return level, [_bill(label, group, level, held) for label, group in groups]


def _bill(label: str, runs: Sequence[RunRecord], level: float | None, held: int) -> Bill:
    last = [course(run)[-1] for run in runs]
    reached = [None if level is None else _reached(run, level, held) for run in runs]
    ends = [r or p for r, p in zip(reached, last, strict=True)]
    return Bill(
        label,
        len(runs),
        runs[0].is_finished,
        {part: fmean(end.parts[part] for end in ends) for part in PARTS},
        fmean(end.round for end in ends),
        fmean(p.joules for p in last),
    )


def _windows(run: RunRecord, held: int) -> Iterator[tuple[Point, float]]:
    """The last point and the lowest accuracy of every `held` evaluated rounds in a row."""
    known = [(p, p.accuracy) for p in course(run) if p.accuracy is not None]
    for stop in range(held, len(known) + 1):
        window = known[stop - held : stop]
        yield window[-1][0], min(accuracy for _, accuracy in window)


def _server_watts(run: RunRecord) -> float:
    of_server = (run.result or {}).get("joules_of_server")
    if of_server:
        return float(of_server["watts"])
    from shoal.cost.devices import PROFILES  # imports torch, which takes seconds

    return PROFILES["server"].active_w
