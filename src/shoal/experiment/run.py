"""Runs: in memory or in a run directory, begun, resumed, profiled."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch

from shoal import engine
from shoal.cost.carbon import Carbon, split_joules
from shoal.cost.ledger import Ledger
from shoal.cost.timer import Timer
from shoal.data.dataset import Progress
from shoal.data.federation import Federation
from shoal.engine import Result, RoundRecord, RoundTiming
from shoal.errors import UserError
from shoal.experiment.assemble import (
    Experiment,
    assemble,
    assemble_job,
    build_costs,
    fleet_session,
    input_facts,
    make_fleet,
    partition_facts,
    validate_job,
)
from shoal.experiment.job import SETTINGS, Job, make_job
from shoal.experiment.result import (
    measure_predict_ms,
    privacy_guarantees,
    privacy_report,
    summarise_run,
    warn_about_weak_noise,
)
from shoal.experiment.settings import JobSettings
from shoal.methods import Setting
from shoal.methods.composition.compose import canonical_name
from shoal.store.run_directory import RunStore
from shoal.types import Method

NOT_TAKEN_BY_RUN: dict[str, str] = {  # part of a setting -> why `shoal.run` does not take it
    "data": "shoal.run is given a federation; say it to shoal.load",
    "partition": "shoal.run is given a federation; say it to shoal.partition",
    "device": "shoal.run is given a federation; say it to shoal.partition",
    "measurement": "only runs that are kept are measured: use the command line",
    "storage": "shoal.run writes no checkpoints: use the command line",
}
OnSetup = Callable[[Experiment], None]
OnRound = Callable[[RoundRecord], None]
OnEnd = Callable[[str | None], None]  # is given the reason if the run ended before its last round


def run(
    method: str | Mapping[str, Any] | Callable[[Setting], Method],
    federation: Federation,
    *,
    on_round: OnRound | None = None,
    **keys: Unpack[JobSettings],
) -> Result:
    """Trains a method on a federation, in memory, and returns its result.

    Parameters
    ----------
    method : str, mapping or callable
        Name of a method, its pieces (as text, or by step, each a name or a class), or a function that builds a method
        from a `Setting`.
    federation : Federation
        Clients and their data, as `shoal.partition` returns them.
    on_round : callable, optional
        Is called with the record of every round. An exception in it ends the run.
    **keys : JobSettings
        Settings of the run, such as `rounds=20`. The page docs/settings.md describes them.

    Returns
    -------
    Result
        Final models, records of the rounds, evaluation and cost ledger.

    Raises
    ------
    UserError
        A setting is unknown, out of range, or belongs to the data.
    """
    method = canonical_name(method) if isinstance(method, Mapping) else method
    name = method if isinstance(method, str) else getattr(method, "__name__", "own")
    given: dict[str, Any] = {**keys}
    for key, value in given.items():
        if key in SETTINGS and (reason := NOT_TAKEN_BY_RUN.get(SETTINGS[key].scope)):
            raise UserError(f"{key} is {value!r}, but {reason}")
    experiment = assemble(make_job({"method": name} | given), method, federation)
    fleet = make_fleet(experiment)
    with fleet_session(experiment, fleet):
        return engine.run(
            experiment.method,
            fleet,
            rounds=experiment.job.rounds,
            seed=experiment.job.seed,
            central_samples=federation.central,
            eval_every=experiment.job.eval_every,
            ledger=Ledger(experiment.costs),
            on_round=on_round,
        )


def run_job(
    job: Job, out: Path, on_setup: OnSetup | None = None, progress: Progress | None = None, **kw: Any
) -> dict[str, Any]:
    """A new run in `out`. Returns what `--json` prints."""
    validate_job(job, out)
    experiment = assemble_job(job, progress)
    experiment.method.init(job.seed)  # what the model cannot do is refused before anything is announced
    if on_setup:
        on_setup(experiment)
    with new_run(experiment, out) as store:
        return run_experiment(experiment, store, **kw)


@contextmanager
def new_run(experiment: Experiment, out: Path) -> Iterator[RunStore]:
    """A run directory to begin in. It is removed if the first round finds an error of the user, such as a layer that is
    not there."""
    unset_keys = {key for key in ("unseen", "variant") if getattr(experiment.job, key) is None}
    config = json.loads(experiment.job.model_dump_json(exclude=unset_keys))
    facts = partition_facts(experiment.federation), experiment.costs.facts()
    with RunStore.create(
        out, config, *facts, keep_checkpoints=experiment.job.keep_checkpoints, inputs=input_facts(experiment.federation)
    ) as store:
        try:
            yield store
        except UserError:
            store.discard_if_not_started()
            raise


def resume_run(
    path: Path,
    on_setup: OnSetup | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    **kw: Any,
) -> dict[str, Any]:
    """Go on from the last complete round; the end is the same bytes as without the stop, with any number of workers."""
    with RunStore.open(path) as store:
        job = job_from_config(store.config)
        if workers is not None:
            job = make_job(job.model_dump() | {"workers": workers})
        experiment = assemble_job(job, progress)
        check_same_data(path, experiment)
        check_same_devices(path, experiment.job)
        store.checkpoints.num_kept = experiment.job.keep_checkpoints
        if on_setup:
            on_setup(experiment)
        return run_experiment(experiment, store, **kw)


def run_or_resume(job: Job, path: Path, **kw: Any) -> dict[str, Any]:
    """Runs a job in `path`, from wherever the run there is."""
    if (path / "config.json").exists():
        return resume_run(path, workers=job.workers, **kw)
    return run_job(job, path, **kw)


def job_from_config(config: Mapping[str, Any]) -> Job:
    """The job that a run directory's config.json describes. A pool of an older run had a piece for each worker."""
    pieces = {"pieces": config.get("workers")} if config.get("fleet") == "pool" else {}
    return make_job(pieces | dict(config))


def check_same_data(path: Path, experiment: Experiment) -> None:
    before = {"public": 0} | json.loads((path / "partition.json").read_text())  # older runs do not say it
    if partition_facts(experiment.federation) != before:
        raise UserError(f"{path} was run on other data: {experiment.job.data!r} no longer gives the same partition")


def profile_job(job: Job, **kw: Any) -> list[dict[str, Any]]:
    """Where a job's time goes, by share: a real run, in a folder that is thrown away."""
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        result = run_job(job, Path(folder) / "run", timer=timer, **kw)
    spent = dict(timer.seconds)
    spent["other"] = max(0.0, result["wall_s"] - sum(spent.values()))
    return [
        {"part": name, "seconds": round(s, 4), "per_round_s": s / job.rounds, "share": s / result["wall_s"]}
        for name, s in sorted(spent.items(), key=lambda item: -item[1])
    ]


def check_same_job(path: Path, job: Job) -> None:
    """A recipe goes on with a run only if it is the run it asks for, and no other process writes it."""
    with RunStore.open(path) as store:
        recorded = job_from_config(store.config)
    clients = recorded.clients or 1
    train = job.num_training_clients(clients)
    requested = job.model_dump() | {"cohort": job.cohort_size(train), "unseen": clients - train or None}
    undecided = {"clients": None, "pieces": None, "fleet": "auto", "public": None}
    undecided |= dict.fromkeys(("edges", "cloud_every", "long_link"))
    open_choices = {k for k, v in undecided.items() if requested[k] == v} | {"workers"}  # these change no byte
    for key, value in requested.items():
        if key not in open_choices and getattr(recorded, key) != value:
            raise UserError(
                f"{path} was run with {key} {getattr(recorded, key)!r}, not {value!r}; choose another --out"
            )
    check_same_devices(path, recorded)


def check_same_devices(path: Path, job: Job) -> None:
    """The joules of one run follow from one set of figures. Runs of older versions did not keep theirs."""
    kept = path / "devices.json"
    if not kept.exists():
        return
    before = json.loads(kept.read_text())
    now = build_costs(job, before["clients"]).facts()
    if now != before:
        other = [name for name, figures in before["devices"].items() if figures != now["devices"].get(name)]
        raise UserError(
            f"{path} was run with other figures of {', '.join(other) or 'the link or the server'} than these have now, "
            "and joules would be mixed: restore them, or start a new run"
        )


def run_experiment(
    experiment: Experiment,
    store: RunStore,
    on_round: OnRound | None = None,
    on_end: OnEnd | None = None,
    timer: Timer | None = None,
) -> dict[str, Any]:
    """Runs the rounds that the run directory lacks, and writes the result."""
    restored, guarantees = store.restore(torch.device(experiment.job.device)), privacy_guarantees(experiment)
    warn_about_weak_noise(guarantees)
    fleet = make_fleet(experiment, store.private)
    _import_before_timing(experiment.method)
    timer = timer or Timer()
    with fleet_session(experiment, fleet), measure_energy(experiment, timer) as measured:
        result = engine.run(
            experiment.method,
            fleet,
            rounds=experiment.job.rounds,
            seed=experiment.job.seed,
            central_samples=experiment.federation.central,
            eval_every=experiment.job.eval_every,
            state=restored.state,
            earlier_rounds=restored.rounds,
            ledger=Ledger(experiment.costs, restored.entries),
            store=store,
            on_round=on_round,
            timer=timer,
        )
    clock = RoundTiming(restored.timing.wall_s + result.wall_s, restored.timing.server_s + result.server_s)
    if measured:
        measured["measured"]["rounds"] = len(result.rounds) - len(restored.rounds)
    summary = (
        summarise_run(experiment, result, store.path, clock)
        | measured
        | privacy_report(experiment, result.state, guarantees)
    )
    summary["predict_ms"] = measure_predict_ms(experiment, result.state, store.private)
    store.finish(summary)
    if on_end:
        on_end(result.stop_reason)
    return summary


def _import_before_timing(method: Method) -> None:
    """Imports what stages import later, so that it is not counted as the work of the round that needs it first."""
    for stage in method.stages:
        for name in getattr(stage, "imports_later", ()):
            importlib.import_module(name)


@contextmanager
def measure_energy(experiment: Experiment, timer: Timer) -> Iterator[dict[str, Any]]:
    """What CodeCarbon says this process used, if asked; known when the work is done."""
    found: dict[str, Any] = {}
    if experiment.job.measure == "none":
        yield found
        return
    with Carbon(experiment.job.country) as carbon:
        yield found
    measured = carbon.measurement
    found["measured"] = {
        **asdict(measured),
        "parts_joules": split_joules(measured, seconds_by_purpose(experiment.method, timer)),
    }


def seconds_by_purpose(method: Method, timer: Timer) -> dict[str, float]:
    """Seconds of a run by what they were for: of clients, what their stage is for."""
    stages = {f"{s.name}: clients": s.purpose for s in method.stages} | {
        f"{s.name}: server": "server" for s in method.stages
    }
    found = dict.fromkeys(("pre", "train", "server", "evaluate", "other"), 0.0)
    for name, seconds in timer.seconds.items():
        found[stages.get(name, "evaluate" if name.startswith("evaluate") else "other")] += seconds
    return found
