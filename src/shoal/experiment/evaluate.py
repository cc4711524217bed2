"""What a finished run serves, evaluated again: to its clients, or to those who were held out of training; as the run
was told to answer, or in another way that its models allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from shoal import engine
from shoal.engine import CentralTestEvaluator, Evaluation
from shoal.errors import UserError
from shoal.experiment.assemble import Experiment, assemble_job, fleet_session, make_fleet
from shoal.experiment.run import check_same_data, job_from_config
from shoal.methods import build, method_factory
from shoal.methods.composition.setting import build_setting
from shoal.store.run_directory import RunStore
from shoal.types import ServerState

Options = Mapping[str, Mapping[str, Any]]


def evaluate_clients(path: Path, progress: Any = None, options: Options | None = None) -> dict[str, Any]:
    """Local and central figures, the same as those of the last round unless `options` of answering are given."""
    with _open_run(path, progress, options) as (store, experiment, state):
        fleet, central = make_fleet(experiment, store.private), experiment.federation.central
        with fleet_session(experiment, fleet):
            evaluation = engine.evaluate(
                experiment.method, fleet, state, CentralTestEvaluator(central) if len(central.y) else None
            )
        return _evaluation_facts(experiment, state, evaluation, options)


def evaluate_unseen_clients(
    path: Path,
    infer_from_inputs: bool = False,
    progress: Any = None,
    num_inputs: int | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """`inputs`: how many of its rows, without labels, each is assigned by; None: all."""
    if num_inputs is not None and num_inputs < 1:
        raise UserError(f"inputs is {num_inputs}; it must be 1 row or more")
    with _open_run(path, progress, options) as (_, experiment, state):
        unseen_clients = experiment.federation.unseen
        if not unseen_clients:
            raise UserError(f"{path} held out nobody: run it with --unseen N to keep some clients out of training")
        if (
            infer_from_inputs
            and experiment.method.models_for_inputs is None
            and experiment.method.adaptation_program is None
        ):
            raise UserError(
                f"--assign: method {experiment.method.name} has no groups that rows without labels point to"
            )
        evaluation = engine.evaluate_unseen(
            experiment.method, state, unseen_clients, infer_from_inputs, num_inputs, experiment.job.seed
        )
        how = {"assigned": infer_from_inputs} | ({} if num_inputs is None else {"inputs": num_inputs})
        return _evaluation_facts(experiment, state, evaluation, options) | {"unseen": len(unseen_clients), **how}


@contextmanager
def _open_run(path: Path, progress: Any, options: Options | None) -> Iterator[tuple[RunStore, Experiment, ServerState]]:
    with RunStore.open(path) as store:
        experiment = assemble_job(job_from_config(store.config), progress)
        check_same_data(path, experiment)
        state = store.load_final_state(experiment.job.device)
        yield store, with_serving_options(experiment, options) if options else experiment, state


def with_serving_options(experiment: Experiment, options: Options) -> Experiment:
    """The same run with other options of answering, once it is known that they change nothing that came before."""
    merged_options = {piece: {**experiment.job.set.get(piece, {}), **keys} for piece, keys in options.items()}
    job = experiment.job.model_copy(update={"set": {**experiment.job.set, **merged_options}})

    def setting(some_job: Any) -> Any:
        return build_setting(
            some_job,
            experiment.model,
            int(some_job.cohort),
            experiment.federation.public_samples,
            experiment.federation.edge_of_client,
        )

    method, make = build(job.method, setting(job)), method_factory(job.method)
    stages_before, stages_after = make(setting(experiment.job)).stages, make(setting(job)).stages
    if not all(any(has_same_behaviour(stage, had) for had in stages_before) for stage in stages_after):
        given = ", ".join(f"{piece}.{key}={value}" for piece, keys in options.items() for key, value in keys.items())
        raise UserError(
            f"--set {given} cannot be changed after training. It changes what clients or the server of method "
            f"{method.name} do in a round, and not only how the run answers. Start a new run to use it."
        )
    return replace(experiment, job=job, method=method)


def has_same_behaviour(one: Any, other: Any) -> bool:
    """Whether two stages, made apart, do the same: functions by their code and by what they were made with. A field
    that is left out of comparisons is of something that is kept, not of what is done."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(has_same_behaviour(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare)
    if isinstance(one, FunctionType):
        within = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
        return one.__code__ is other.__code__ and has_same_behaviour(*within)
    if isinstance(one, MethodType):  # of two pieces that are equal, but not the same object
        return has_same_behaviour(one.__func__, other.__func__) and has_same_behaviour(one.__self__, other.__self__)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(has_same_behaviour, one, other))
    return bool(one == other)


def _evaluation_facts(
    experiment: Experiment, state: ServerState, evaluation: Evaluation, options: Options | None
) -> dict[str, Any]:
    return {
        "method": experiment.job.method,
        "round": state.round,
        **({"set": {piece: dict(keys) for piece, keys in options.items()}} if options else {}),
        **evaluation.summary(),
        "clients": {
            c: asdict(score)
            | ({"answered_by": dict(evaluation.samples_by_model[c])} if c in evaluation.samples_by_model else {})
            for c, score in sorted(evaluation.clients.items())
        },
    }
