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
from shoal.experiment.assemble import Bench, at_work, make_fleet, setup
from shoal.experiment.run import check_data, recorded_job
from shoal.methods import build, method_factory
from shoal.methods.composition.setting import build_setting
from shoal.store.run_directory import RunStore
from shoal.types import ServerState

Options = Mapping[str, Mapping[str, Any]]


def of_clients(path: Path, progress: Any = None, options: Options | None = None) -> dict[str, Any]:
    """Local and central figures, the same as those of the last round unless `options` of answering are given."""
    with _opened(path, progress, options) as (store, bench, state):
        fleet, central = make_fleet(bench, store.private), bench.federation.central
        with at_work(bench, fleet):
            found = engine.evaluate(
                bench.method, fleet, state, CentralTestEvaluator(central) if len(central.y) else None
            )
        return _said(bench, state, found, options)


def of_unseen(
    path: Path,
    assign: bool = False,
    progress: Any = None,
    inputs: int | None = None,
    options: Options | None = None,
) -> dict[str, Any]:
    """`inputs`: how many of its rows, without labels, each is assigned by; None: all."""
    if inputs is not None and inputs < 1:
        raise UserError(f"inputs is {inputs}; it must be 1 row or more")
    with _opened(path, progress, options) as (_, bench, state):
        held = bench.federation.unseen
        if not held:
            raise UserError(f"{path} held out nobody: run it with --unseen N to keep some clients out of training")
        if assign and bench.method.models_for_inputs is None and bench.method.adaptation_program is None:
            raise UserError(f"--assign: method {bench.method.name} has no groups that rows without labels point to")
        found = engine.evaluate_unseen(bench.method, state, held, assign, inputs, bench.job.seed)
        how = {"assigned": assign} | ({} if inputs is None else {"inputs": inputs})
        return _said(bench, state, found, options) | {"unseen": len(held), **how}


@contextmanager
def _opened(path: Path, progress: Any, options: Options | None) -> Iterator[tuple[RunStore, Bench, ServerState]]:
    with RunStore.open(path) as store:
        bench = setup(recorded_job(store.config), progress)
        check_data(path, bench)
        state = store.load_final_state(bench.job.device)
        yield store, answering(bench, options) if options else bench, state


def answering(bench: Bench, options: Options) -> Bench:
    """The same run with other options of answering, once it is known that they change nothing that came before."""
    chosen = {piece: {**bench.job.set.get(piece, {}), **keys} for piece, keys in options.items()}
    job = bench.job.model_copy(update={"set": {**bench.job.set, **chosen}})

    def setting(of: Any) -> Any:
        return build_setting(
            of, bench.model, int(of.cohort), bench.federation.public_samples, bench.federation.edge_of_client
        )

    method, make = build(job.method, setting(job)), method_factory(job.method)
    before, after = make(setting(bench.job)).stages, make(setting(job)).stages
    if not all(any(alike(stage, had) for had in before) for stage in after):
        given = ", ".join(f"{piece}.{key}={value}" for piece, keys in options.items() for key, value in keys.items())
        raise UserError(
            f"--set {given} cannot be changed after training. It changes what clients or the server of method "
            f"{method.name} do in a round, and not only how the run answers. Start a new run to use it."
        )
    return replace(bench, job=job, method=method)


def alike(one: Any, other: Any) -> bool:
    """Whether two stages, made apart, do the same: functions by their code and by what they were made with. A field
    that is left out of comparisons is of something that is kept, not of what is done."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(alike(getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare)
    if isinstance(one, FunctionType):
        within = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, other)]
        return one.__code__ is other.__code__ and alike(*within)
    if isinstance(one, MethodType):  # of two pieces that are equal, but not the same object
        return alike(one.__func__, other.__func__) and alike(one.__self__, other.__self__)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def _said(bench: Bench, state: ServerState, found: Evaluation, options: Options | None) -> dict[str, Any]:
    return {
        "method": bench.job.method,
        "round": state.round,
        **({"set": {piece: dict(keys) for piece, keys in options.items()}} if options else {}),
        **found.figures(),
        "clients": {
            c: asdict(score) | ({"answered_by": dict(found.answered_by[c])} if c in found.answered_by else {})
            for c, score in sorted(found.clients.items())
        },
    }
