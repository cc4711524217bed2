"""Worker processes, one per core and one thread each: pieces of a plan go out to them, results come back.

Workers are forked, so they see the data and the programs where they lie: nothing is copied, no shared-memory
segment exists that could be left behind. A round's models go to each worker once, however many of its clients
use them. Messages are `shoal.codec`'s bytes. Programs are pure, so the work of a worker that dies is simply
done again by its successor, with the same result. Which clients are together in a piece does not depend on the
workers (see `shoal.fleet.dealing`), so any number of workers gives the same bytes.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from shoal.client.evaluate import Evaluate
from shoal.codec import pack, unpack
from shoal.fleet.dealing import deal
from shoal.fleet.plain import ClientError, PlainFleet
from shoal.types import ClientData, ClientId, ClientProgram, Method, Params, Plan, Report, Task, Tree

log = logging.getLogger(__name__)

MakeFleet = Callable[[Mapping[ClientId, ClientData], MutableMapping[ClientId, Tree]], PlainFleet]
ATTEMPTS = 3  # of a piece of work: one that kills its worker every time is not the machine's fault


def cores() -> int:
    """That this process may use. Elsewhere than on Linux a fork is not safe to build on: one."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


class PoolFleet:
    """`inside` makes the fleet that each worker runs: stacked clients for dense models, plain for convolutions.
    `workers` and `pieces` are the number of cores if they are not given; only `pieces` has an influence on results."""

    def __init__(
        self,
        method: Method,
        data: Mapping[ClientId, ClientData],
        private: MutableMapping[ClientId, Tree] | None = None,
        inside: MakeFleet = PlainFleet,
        workers: int | None = None,
        pieces: int | None = None,
    ) -> None:
        evaluate = Evaluate.of(method)
        self.data = data
        self.private: MutableMapping[ClientId, Tree] = {} if private is None else private
        self._programs = method.programs | {evaluate.name: evaluate}
        self._inside = inside
        self._roster = tuple(sorted(data))
        self._workers: list[Worker] = []
        self._count = workers or cores()
        self._pieces = pieces or cores()
        weakref.finalize(self, _stop, self._workers)

    def roster(self) -> tuple[ClientId, ...]:
        return self._roster

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        self._learn(plan.program)
        pieces = deal(plan, self.data, self._pieces)
        while len(self._workers) < min(self._count, len(pieces)):
            self._workers.append(self._hired())
        for worker in self._workers:
            worker.knows.clear()  # models go by their identity, which lasts as long as the plan
        reports: dict[ClientId, Report] = {}
        try:
            for reply in self._replies(plan.program, pieces):
                found, private = read_reply(reply)
                reports |= found
                for client, kept in private.items():
                    self.private[client] = kept
        except BaseException:
            self.close()  # replies to this round must not be taken for those to the next
            raise
        return {c: reports[c] for c in plan.tasks}

    def close(self) -> None:
        _stop(self._workers)

    def _learn(self, program: ClientProgram) -> None:
        if self._programs.get(program.name) != program:
            self._programs[program.name] = program
            self.close()  # workers know the programs that were there when they were hired

    def _hired(self) -> Worker:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        others = [w.pipe for w in self._workers] + [here]
        quiet = bool(self._workers)  # what all workers would say, one says
        arguments = (there, others, self._programs, self.data, self._inside, quiet)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        there.close()
        return Worker(process, here)

    def _replies(self, program: ClientProgram, pieces: Sequence[Mapping[ClientId, Task]]) -> Iterator[bytes]:
        """As they come; a worker that dies is replaced and its piece done again."""
        left = deque(range(len(pieces)))
        attempts = [0] * len(pieces)
        busy = {worker: left.popleft() for worker in range(min(len(self._workers), len(left)))}
        for worker, piece in busy.items():
            self._begin(worker, program, pieces[piece], attempts, piece)
        while busy:
            ready = wait([self._workers[w].pipe for w in busy])
            for worker in [w for w in busy if self._workers[w].pipe in ready]:
                reply = self._reply(worker)
                if reply is not None:
                    del busy[worker]
                if reply is not None and left:
                    busy[worker] = left.popleft()
                if worker in busy:  # with the next piece, or with the same one again
                    self._begin(worker, program, pieces[busy[worker]], attempts, busy[worker])
                if reply is not None:
                    yield reply

    def _begin(
        self, worker: int, program: ClientProgram, tasks: Mapping[ClientId, Task], attempts: list[int], piece: int
    ) -> None:
        while attempts[piece] < ATTEMPTS:
            attempts[piece] += 1
            try:
                self._workers[worker].pipe.send_bytes(self._work(program, tasks, self._workers[worker]))
                return
            except OSError:
                self._replace(worker)
        raise ClientError(f"a worker process died {ATTEMPTS} times over the same work; is there enough memory?")

    def _reply(self, worker: int) -> bytes | None:
        try:
            return self._workers[worker].pipe.recv_bytes()
        except (EOFError, OSError):
            self._replace(worker)
            return None

    def _work(self, program: ClientProgram, tasks: Mapping[ClientId, Task], worker: Worker) -> bytes:
        private = {c: self.private[c] for c in tasks if c in self.private}
        return work_message(program.name, tasks, private, worker.knows)

    def _replace(self, i: int) -> None:
        log.warning("worker %d died; another does its work again", i)
        self._workers[i].stop()
        self._workers[i] = self._hired()


@dataclass
class Worker:
    process: ForkProcess
    pipe: Connection
    knows: dict[int, int] = field(default_factory=dict)  # this round's models that it has: identity -> number

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()


def _serve(
    pipe: Connection,
    others: Sequence[Connection],
    programs: Mapping[str, ClientProgram],
    data: Mapping[ClientId, ClientData],
    inside: MakeFleet,
    quiet: bool,
) -> None:
    """A worker's life: until the other end of its pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers
    for other in others:
        other.close()  # or a dead parent would look alive through a sibling's copy of its end
    torch.set_num_threads(1)
    if quiet:
        logging.disable(logging.WARNING)
    private: dict[ClientId, Tree] = {}
    models: dict[str, Params] = {}
    fleet = inside(data, private)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        name, tasks, held = read_work(message, models)
        private.clear()
        private.update(held)
        try:
            reports = fleet.execute(Plan(programs[name], tasks))
            changed = {c: t for c, t in private.items() if t is not held.get(c)}
            pipe.send_bytes(reply_message(reports, changed))
        except Exception as error:  # any that the parent should hear of; dying is for what Python cannot catch
            said = str(error) if isinstance(error, ClientError) else f"{name}: {traceback.format_exc()}"
            pipe.send_bytes(pack({}, {"error": said}))


def work_message(
    program: str, tasks: Mapping[ClientId, Task], private: Mapping[ClientId, Tree], knows: dict[int, int]
) -> bytes:
    """Tasks name their models by number; only models that the worker does not know yet go along."""
    first = not knows
    models: dict[str, Params] = {}
    facts: dict[ClientId, Any] = {}
    for client, task in tasks.items():
        for model in task.models.values():
            if id(model) not in knows:
                knows[id(model)] = len(knows)
                models[str(knows[id(model)])] = model
        named = {name: str(knows[id(model)]) for name, model in task.models.items()}
        facts[client] = [named, dict(task.config), task.seed]
    meta = {"program": program, "tasks": list(facts.items()), "first": first}
    return pack({"models": models, "private": dict(private)}, meta)


def read_work(message: bytes, models: dict[str, Params]) -> tuple[str, dict[ClientId, Task], dict[ClientId, Tree]]:
    """`models` are those that came before in this round; those that come now are added."""
    t, meta = unpack(message)
    if meta["first"]:
        models.clear()
    models |= t.get("models", {})
    tasks = {
        client: Task({name: models[number] for name, number in named.items()}, config, seed)
        for client, (named, config, seed) in meta["tasks"]
    }
    return meta["program"], tasks, t.get("private", {})


def reply_message(reports: Mapping[ClientId, Report], private: Mapping[ClientId, Tree]) -> bytes:
    facts = {c: [{k: list(v) for k, v in r.metrics.items()}, dict(r.counts), r.flops] for c, r in reports.items()}
    tensors = {c: dict(r.tensors) for c, r in reports.items()}
    return pack({"tensors": tensors, "private": dict(private)}, {"reports": facts})


def read_reply(message: bytes) -> tuple[dict[ClientId, Report], dict[ClientId, Tree]]:
    t, meta = unpack(message)
    if "error" in meta:
        raise ClientError(meta["error"])
    tensors = t.get("tensors", {})
    reports = {
        c: Report(tensors.get(c, {}), {k: (s, n) for k, (s, n) in metrics.items()}, counts, flops)
        for c, (metrics, counts, flops) in meta["reports"].items()
    }
    return reports, t.get("private", {})
