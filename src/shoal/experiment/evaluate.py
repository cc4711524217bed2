"""Evaluates the models of a finished run again: on its clients, or on the unseen clients.

Serving options may differ from those of the run, as long as they change nothing in training.
"""

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
    """Returns local and central metrics. Without serving `options` they equal those of the last round."""
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
    """Returns the metrics of the unseen clients.

    With `infer_from_inputs` the cluster or the class prior of each client is inferred from `num_inputs` of its inputs,
    without labels, or from all of them.
    """
    if num_inputs is not None and num_inputs < 1:
        raise UserError(f"num_inputs is {num_inputs}; it must be 1 or more")
    with _open_run(path, progress, options) as (_, experiment, state):
        unseen_clients = experiment.federation.unseen
        if not unseen_clients:
            raise UserError(
                f"{path} has no unseen clients. Start a run with --unseen N to exclude clients from training."
            )
        if (
            infer_from_inputs
            and experiment.method.models_for_inputs is None
            and experiment.method.adaptation_program is None
        ):
            raise UserError(
                f"--infer-from-inputs does not work with method {experiment.method.name}, which infers no cluster "
                "and no class prior from inputs. Leave it out."
            )
        evaluation = engine.evaluate_unseen(
            experiment.method, state, unseen_clients, infer_from_inputs, num_inputs, experiment.job.seed
        )
        inference_facts = {"inferred_from_inputs": infer_from_inputs} | (
            {} if num_inputs is None else {"num_inputs": num_inputs}
        )
        return _evaluation_facts(experiment, state, evaluation, options) | {
            "num_unseen_clients": len(unseen_clients),
            **inference_facts,
        }


@contextmanager
def _open_run(path: Path, progress: Any, options: Options | None) -> Iterator[tuple[RunStore, Experiment, ServerState]]:
    with RunStore.open(path) as store:
        experiment = assemble_job(job_from_config(store.config), progress)
        check_same_data(path, experiment)
        state = store.load_final_state(experiment.job.device)
        yield store, with_serving_options(experiment, options) if options else experiment, state


def with_serving_options(experiment: Experiment, options: Options) -> Experiment:
    """Returns the experiment with other serving options. Options that would have changed training are refused."""
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
    if not all(any(has_same_behaviour(stage, earlier) for earlier in stages_before) for stage in stages_after):
        options_text = ", ".join(
            f"{piece}.{key}={value}" for piece, keys in options.items() for key, value in keys.items()
        )
        raise UserError(
            f"--set {options_text} cannot be changed after training. It changes what clients or the server of method "
            f"{method.name} do in a round, and not only how the run predicts. Start a new run to use it."
        )
    return replace(experiment, job=job, method=method)


def has_same_behaviour(one: Any, other: Any) -> bool:
    """Returns whether two stages that were built separately do the same.

    Functions are compared by their code and by the values that they close over. A dataclass field with `compare=False`
    is skipped: it caches something and does not change what the stage does.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(has_same_behaviour(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare)
    if isinstance(one, FunctionType):
        closures = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
        return one.__code__ is other.__code__ and has_same_behaviour(*closures)
    if isinstance(one, MethodType):  # bound to equal pieces that are not the same object
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
            | ({"samples_by_model": dict(evaluation.samples_by_model[c])} if c in evaluation.samples_by_model else {})
            for c, score in sorted(evaluation.clients.items())
        },
    }
