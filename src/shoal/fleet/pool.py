"""Worker processes, one per core and one thread each: clients are dealt to them, results come back.

Workers are forked, so they see the data and the programs where they lie: nothing is copied, no shared-memory
segment exists that could be left behind. A round's models go to each worker once, however many of its clients
use them. Messages are `shoal.codec`'s bytes. Programs are pure, so the work of a worker that dies is simply
done again by its successor, with the same result.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from shoal.client.evaluate import Evaluate
from shoal.codec import pack, unpack
from shoal.fleet.plain import ClientError, PlainFleet
from shoal.types import ClientData, ClientId, ClientProgram, Method, Params, Plan, Report, Task, Tree

log = logging.getLogger(__name__)

MakeFleet = Callable[[Mapping[ClientId, ClientData], MutableMapping[ClientId, Tree]], PlainFleet]
ATTEMPTS = 3  # of a piece of work: one that kills its worker every time is not the machine's fault


def cores() -> int:
    """That this process may use. Elsewhere than on Linux a fork is not safe to build on: one."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


class PoolFleet:
    """`inside` makes the fleet that each worker runs: stacked clients for dense models, plain for convolutions."""

    def __init__(
        self,
        method: Method,
        data: Mapping[ClientId, ClientData],
        private: MutableMapping[ClientId, Tree] | None = None,
        inside: MakeFleet = PlainFleet,
        workers: int | None = None,
    ) -> None:
        evaluate = Evaluate.of(method)
        self.data = data
        self.private: MutableMapping[ClientId, Tree] = {} if private is None else private
        self._programs = method.programs | {evaluate.name: evaluate}
        self._inside = inside
        self._roster = tuple(sorted(data))
        self._workers: list[Worker] = []
        self._count = workers or cores()
        weakref.finalize(self, _stop, self._workers)

    def roster(self) -> tuple[ClientId, ...]:
        return self._roster

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        shares = self._dealt(plan)
        while len(self._workers) < len(shares):
            self._workers.append(self._hired())
        works = [self._work(plan.program, {c: plan.tasks[c] for c in share}) for share in shares]
        try:
            replies = self._done(works)
        except BaseException:
            self.close()  # replies to this round must not be taken for those to the next
            raise
        reports: dict[ClientId, Report] = {}
        for reply in replies:
            found, private = read_reply(reply)
            reports |= found
            for client, kept in private.items():
                self.private[client] = kept
        return {c: reports[c] for c in plan.tasks}

    def close(self) -> None:
        _stop(self._workers)

    def _dealt(self, plan: Plan) -> list[list[ClientId]]:
        """Largest first, each to the worker with the least to do so far; the same deal for the same plan."""
        assert plan.program is not None
        passes = [(phase.split, phase.epochs) for phase in plan.program.phases]
        load = {c: sum(n * len(self.data[c][split].y) for split, n in passes) for c in plan.tasks}
        shares: list[list[ClientId]] = [[] for _ in range(min(self._count, len(load)))]
        total = [0] * len(shares)
        for client in sorted(load, key=lambda c: (-load[c], c)):
            least = total.index(min(total))
            shares[least].append(client)
            total[least] += load[client]
        return shares

    def _work(self, program: ClientProgram, tasks: Mapping[ClientId, Task]) -> bytes:
        if self._programs.get(program.name) != program:
            self._programs[program.name] = program
            self.close()  # workers know the programs that were there when they were hired
            self._workers.extend(self._hired() for _ in range(self._count))
        return work_message(program.name, tasks, {c: self.private[c] for c in tasks if c in self.private})

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

    def _done(self, works: Sequence[bytes]) -> list[bytes]:
        """One reply per piece of work; a worker that dies is replaced and its work done again."""
        replies: dict[int, bytes] = {}
        attempts = [0] * len(works)
        waiting = set(range(len(works)))
        for i in waiting:
            self._send(i, works[i], attempts)
        while waiting:
            ready = wait([self._workers[i].pipe for i in waiting])
            for i in [i for i in waiting if self._workers[i].pipe in ready]:
                try:
                    replies[i] = self._workers[i].pipe.recv_bytes()
                    waiting.discard(i)
                except (EOFError, OSError):
                    log.warning("worker %d died; another does its work again", i)
                    self._replace(i)
                    self._send(i, works[i], attempts)
        return [replies[i] for i in range(len(works))]

    def _send(self, i: int, work: bytes, attempts: list[int]) -> None:
        attempts[i] += 1
        if attempts[i] > ATTEMPTS:
            raise ClientError(f"a worker process died {ATTEMPTS} times over the same work; is there enough memory?")
        try:
            self._workers[i].pipe.send_bytes(work)
        except OSError:
            self._replace(i)
            self._send(i, work, attempts)

    def _replace(self, i: int) -> None:
        self._workers[i].stop()
        self._workers[i] = self._hired()


@dataclass
class Worker:
    process: ForkProcess
    pipe: Connection

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
    fleet = inside(data, private)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        name, tasks, held = read_work(message)
        private.clear()
        private.update(held)
        try:
            reports = fleet.execute(Plan(programs[name], tasks))
            changed = {c: t for c, t in private.items() if t is not held.get(c)}
            pipe.send_bytes(reply_message(reports, changed))
        except Exception as error:  # any that the parent should hear of; dying is for what Python cannot catch
            said = str(error) if isinstance(error, ClientError) else f"{name}: {traceback.format_exc()}"
            pipe.send_bytes(pack({}, {"error": said}))


def work_message(program: str, tasks: Mapping[ClientId, Task], private: Mapping[ClientId, Tree]) -> bytes:
    """Every model once: tasks name theirs by number."""
    numbers: dict[int, int] = {}
    models: dict[str, Params] = {}
    facts: dict[ClientId, Any] = {}
    for client, task in tasks.items():
        for model in task.models.values():
            if id(model) not in numbers:
                numbers[id(model)] = len(numbers)
                models[str(numbers[id(model)])] = model
        named = {name: str(numbers[id(model)]) for name, model in task.models.items()}
        facts[client] = [named, dict(task.config), task.seed]
    return pack({"models": models, "private": dict(private)}, {"program": program, "tasks": list(facts.items())})


def read_work(message: bytes) -> tuple[str, dict[ClientId, Task], dict[ClientId, Tree]]:
    t, meta = unpack(message)
    models = t.get("models", {})
    tasks = {
        client: Task({name: models[number] for name, number in named.items()}, config, seed)
        for client, (named, config, seed) in meta["tasks"]
    }
    return meta["program"], tasks, t.get("private", {})


def reply_message(reports: Mapping[ClientId, Report], private: Mapping[ClientId, Tree]) -> bytes:
    facts = {c: [{k: list(v) for k, v in r.metrics.items()}, dict(r.counts)] for c, r in reports.items()}
    tensors = {c: dict(r.tensors) for c, r in reports.items()}
    return pack({"tensors": tensors, "private": dict(private)}, {"reports": facts})


def read_reply(message: bytes) -> tuple[dict[ClientId, Report], dict[ClientId, Tree]]:
    t, meta = unpack(message)
    if "error" in meta:
        raise ClientError(meta["error"])
    tensors = t.get("tensors", {})
    reports = {
        c: Report(tensors.get(c, {}), {k: (s, n) for k, (s, n) in metrics.items()}, counts)
        for c, (metrics, counts) in meta["reports"].items()
    }
    return reports, t.get("private", {})
