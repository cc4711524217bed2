"""What a finished run serves, evaluated again: to its clients, or to those who were held out of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal import engine
from shoal.bench import Bench, at_work, make_fleet, setup
from shoal.engine import Evaluation, UnseenClient
from shoal.errors import UserError
from shoal.job import make_job
from shoal.lab import check_data
from shoal.store.run import RunStore
from shoal.types import ServerState


def of_clients(path: Path, progress: Any = None) -> dict[str, Any]:
    """Local and central figures, the same as those of the last round."""
    with _opened(path, progress) as (store, bench, state):
        fleet, central = make_fleet(bench, store.private), bench.federation.central
        with at_work(fleet):
            found = engine.evaluate(bench.method, fleet, state, UnseenClient(central) if len(central.y) else None)
        return _said(bench, state, found)


def of_unseen(path: Path, assign: bool = False, progress: Any = None, inputs: int | None = None) -> dict[str, Any]:
    """`inputs`: how many of its rows, without labels, each is assigned by; None: all."""
    if inputs is not None and inputs < 1:
        raise UserError(f"inputs is {inputs}; it must be 1 row or more")
    with _opened(path, progress) as (_, bench, state):
        held = bench.federation.unseen
        if not held:
            raise UserError(f"{path} held out nobody: run it with --unseen N to keep some clients out of training")
        if assign and bench.method.assign is None and bench.method.adapt is None:
            raise UserError(f"--assign: method {bench.method.name} has no groups that rows without labels point to")
        found = engine.evaluate_unseen(bench.method, state, held, assign, inputs, bench.job.seed)
        how = {"assigned": assign} | ({} if inputs is None else {"inputs": inputs})
        return _said(bench, state, found) | {"unseen": len(held), **how}


@contextmanager
def _opened(path: Path, progress: Any) -> Iterator[tuple[RunStore, Bench, ServerState]]:
    with RunStore.open(path) as store:
        bench = setup(make_job(store.config), progress)
        check_data(path, bench)
        yield store, bench, store.last(bench.job.device)


def _said(bench: Bench, state: ServerState, found: Evaluation) -> dict[str, Any]:
    return {
        "method": bench.job.method,
        "round": state.round,
        **found.figures(),
        "clients": {c: asdict(score) for c, score in sorted(found.clients.items())},
    }
