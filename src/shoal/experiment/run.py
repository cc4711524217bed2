"""Runs jobs: in memory or in a run directory. Runs can be resumed and profiled.

engine.py has the rounds. result.py summarises them.
"""

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

NOT_TAKEN_BY_RUN: dict[str, str] = {  # scope of a setting -> why `shoal.run` does not take it
    "data": "shoal.run gets a federation that has its data. Pass the setting to shoal.load.",
    "partition": "shoal.run gets a federation that is divided already. Pass the setting to shoal.partition.",
    "device": "shoal.run gets a federation that is divided already. Pass the setting to shoal.partition.",
    "measurement": "shoal.run measures no energy. Use the command line.",
    "storage": "shoal.run writes no checkpoints. Use the command line.",
}
OnSetup = Callable[[Experiment], None]
OnRound = Callable[[RoundRecord], None]
OnEnd = Callable[[str | None], None]  # its argument is the reason if the run ends early


def run(
    method: str | Mapping[str, Any] | Callable[[Setting], Method],
    federation: Federation,
    *,
    on_round: OnRound | None = None,
    **keys: Unpack[JobSettings],
) -> Result:
    """Trains a method on a federation in memory and returns its result.

    Parameters
    ----------
    method : str, mapping or callable
        Name of a method, its pieces as text, a mapping from steps to pieces (names or classes), or a function that
        builds a method from a `Setting`.
    federation : Federation
        Clients and their data, as `shoal.partition` returns them.
    on_round : callable, optional
        Function that is called with the record of every round. An exception in it ends the run.
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
    settings: dict[str, Any] = {**keys}
    for key, value in settings.items():
        if key in SETTINGS and (reason := NOT_TAKEN_BY_RUN.get(SETTINGS[key].scope)):
            raise UserError(f"{key} is {value!r}, but {reason}")
    experiment = assemble(make_job({"method": name} | settings), method, federation)
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
    """Runs a job in the new run directory `out` and returns the content of result.json."""
    validate_job(job, out)
    experiment = assemble_job(job, progress)
    experiment.method.init(job.seed)  # refuses what the model cannot do, before the run is announced
    if on_setup:
        on_setup(experiment)
    with new_run(experiment, out) as store:
        return run_experiment(experiment, store, **kw)


@contextmanager
def new_run(experiment: Experiment, out: Path) -> Iterator[RunStore]:
    """Yields a new run directory.

    The directory is removed if the first round finds an error of the user, such as a layer that the model lacks or a
    disk that is full.
    """
    unset_keys = {key for key in ("unseen", "variant") if getattr(experiment.job, key) is None}
    config = json.loads(experiment.job.model_dump_json(exclude=unset_keys))
    facts = partition_facts(experiment.federation), experiment.costs.facts()
    with RunStore.create(
        out, config, *facts, keep_checkpoints=experiment.job.keep_checkpoints, inputs=input_facts(experiment.federation)
    ) as store:
        try:
            yield store
        except (UserError, OSError):
            store.discard_if_not_started()
            raise


def resume_run(
    path: Path,
    on_setup: OnSetup | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    **kw: Any,
) -> dict[str, Any]:
    """Resumes a run from its last complete round and returns the content of result.json.

    The run directory ends with the same bytes as without the stop, for any number of workers.
    """
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
    """Runs a job in `path`, or resumes the run that is there."""
    if (path / "config.json").exists():
        return resume_run(path, workers=job.workers, **kw)
    return run_job(job, path, **kw)


def job_from_config(config: Mapping[str, Any]) -> Job:
    """Returns the job that the config.json of a run directory describes."""
    return make_job(config)


def check_same_data(path: Path, experiment: Experiment) -> None:
    """Refuses to continue a run if the job no longer gives the partition that the run had."""
    recorded = json.loads((path / "partition.json").read_text())
    if partition_facts(experiment.federation) != recorded:
        raise UserError(
            f"{path} was run on other data: {experiment.job.data!r} no longer gives the same partition. Restore the "
            "data, or start a new run."
        )


def profile_job(job: Job, **kw: Any) -> list[dict[str, Any]]:
    """Returns the seconds of each part of a job, the longest first. The job runs in a temporary folder."""
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        result = run_job(job, Path(folder) / "run", timer=timer, **kw)
    spent = dict(timer.seconds)
    spent["other"] = max(0.0, result["wall_s"] - sum(spent.values()))
    return [
        {"part": name, "seconds": round(s, 4), "per_round_s": s / job.rounds, "fraction": s / result["wall_s"]}
        for name, s in sorted(spent.items(), key=lambda item: -item[1])
    ]


def check_same_job(path: Path, job: Job) -> None:
    """Refuses to continue a run that differs from the job, or that another process writes."""
    with RunStore.open(path) as store:
        recorded = job_from_config(store.config)
    clients = recorded.clients or 1
    train = job.num_training_clients(clients)
    requested = job.model_dump() | {"cohort": job.cohort_size(train), "unseen": clients - train or None}
    undecided = {"clients": None, "pieces": None, "fleet": "auto", "public_samples": None}
    undecided |= dict.fromkeys(("edges", "cloud_every_rounds", "cloud_link"))
    open_choices = {k for k, v in undecided.items() if requested[k] == v} | {"workers"}  # these settings change no byte
    for key, value in requested.items():
        if key not in open_choices and getattr(recorded, key) != value:
            raise UserError(
                f"{path} was run with {key} {getattr(recorded, key)!r}, not {value!r}. Choose another --out."
            )
    check_same_devices(path, recorded)


def check_same_devices(path: Path, job: Job) -> None:
    """Refuses to continue a run if its devices or links have other values now, because joules would be mixed."""
    recorded = json.loads((path / "devices.json").read_text())
    current = build_costs(job, recorded["clients"]).facts()
    if current != recorded:
        changed = [name for name, facts in recorded["devices"].items() if facts != current["devices"].get(name)]
        raise UserError(
            f"{path} was run with other values of {', '.join(changed) or 'the link or the server'}, and its joules "
            "would be mixed. Restore the values, or start a new run."
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
    """Yields a dict that has the measurement of CodeCarbon after the block, if the job asks for one."""
    facts: dict[str, Any] = {}
    if experiment.job.measure == "none":
        yield facts
        return
    with Carbon(experiment.job.country) as carbon:
        yield facts
    measured = carbon.measurement
    facts["measured"] = {
        **asdict(measured),
        "parts_joules": split_joules(measured, seconds_by_purpose(experiment.method, timer)),
    }


def seconds_by_purpose(method: Method, timer: Timer) -> dict[str, float]:
    """Returns the seconds of a run by purpose. Seconds of clients count for the purpose of their stage."""
    purposes = {f"{s.name}: clients": s.purpose for s in method.stages} | {
        f"{s.name}: server": "server" for s in method.stages
    }
    totals = dict.fromkeys(("preparation", "training", "server", "evaluate", "other"), 0.0)
    for name, seconds in timer.seconds.items():
        totals[purposes.get(name, "evaluate" if name.startswith("evaluate") else "other")] += seconds
    return totals
