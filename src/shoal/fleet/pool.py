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

FleetFactory = Callable[[Mapping[ClientId, ClientData], MutableMapping[ClientId, Tree]], PlainFleet]
MAX_ATTEMPTS = 3  # of a piece of work: one that kills its worker every time is not the machine's fault


def count_cores() -> int:
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
        make_fleet: FleetFactory = PlainFleet,
        workers: int | None = None,
        pieces: int | None = None,
    ) -> None:
        evaluate = Evaluate.for_method(method)
        self.data = data
        self.private: MutableMapping[ClientId, Tree] = {} if private is None else private
        self._programs = method.programs | {evaluate.name: evaluate}
        self._make_fleet = make_fleet
        self._roster = tuple(sorted(data))
        self._workers: list[Worker] = []
        self._num_workers = workers or count_cores()
        self._num_pieces = pieces or count_cores()
        weakref.finalize(self, _stop_workers, self._workers)

    def roster(self) -> tuple[ClientId, ...]:
        return self._roster

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        assert plan.program is not None
        self._add_program(plan.program)
        pieces = deal(plan, self.data, self._num_pieces)
        while len(self._workers) < min(self._num_workers, len(pieces)):
            self._workers.append(self._start_worker())
        for worker in self._workers:
            worker.sent_models.clear()  # models go by their identity, which lasts as long as the plan
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
        _stop_workers(self._workers)

    def _add_program(self, program: ClientProgram) -> None:
        if self._programs.get(program.name) != program:
            self._programs[program.name] = program
            self.close()  # workers know the programs that were there when they were hired

    def _start_worker(self) -> Worker:
        context = multiprocessing.get_context("fork")
        parent_end, worker_end = context.Pipe()
        others = [w.pipe for w in self._workers] + [parent_end]
        quiet = bool(self._workers)  # what all workers would say, one says
        arguments = (worker_end, others, self._programs, self.data, self._make_fleet, quiet)
        process = context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        worker_end.close()
        return Worker(process, parent_end)

    def _replies(self, program: ClientProgram, pieces: Sequence[Mapping[ClientId, Task]]) -> Iterator[bytes]:
        """As they come; a worker that dies is replaced and its piece done again."""
        waiting_pieces = deque(range(len(pieces)))
        attempts = [0] * len(pieces)
        piece_of_worker = {
            worker: waiting_pieces.popleft() for worker in range(min(len(self._workers), len(waiting_pieces)))
        }
        for worker, piece in piece_of_worker.items():
            self._send_piece(worker, program, pieces[piece], attempts, piece)
        while piece_of_worker:
            ready = wait([self._workers[w].pipe for w in piece_of_worker])
            for worker in [w for w in piece_of_worker if self._workers[w].pipe in ready]:
                reply = self._receive_reply(worker)
                if reply is not None:
                    del piece_of_worker[worker]
                if reply is not None and waiting_pieces:
                    piece_of_worker[worker] = waiting_pieces.popleft()
                if worker in piece_of_worker:  # with the next piece, or with the same one again
                    self._send_piece(
                        worker, program, pieces[piece_of_worker[worker]], attempts, piece_of_worker[worker]
                    )
                if reply is not None:
                    yield reply

    def _send_piece(
        self, worker: int, program: ClientProgram, tasks: Mapping[ClientId, Task], attempts: list[int], piece: int
    ) -> None:
        while attempts[piece] < MAX_ATTEMPTS:
            attempts[piece] += 1
            try:
                self._workers[worker].pipe.send_bytes(self._encode_piece(program, tasks, self._workers[worker]))
                return
            except OSError:
                self._replace_worker(worker)
        raise ClientError(f"a worker process died {MAX_ATTEMPTS} times over the same work; is there enough memory?")

    def _receive_reply(self, worker: int) -> bytes | None:
        try:
            return self._workers[worker].pipe.recv_bytes()
        except (EOFError, OSError):
            self._replace_worker(worker)
            return None

    def _encode_piece(self, program: ClientProgram, tasks: Mapping[ClientId, Task], worker: Worker) -> bytes:
        private = {c: self.private[c] for c in tasks if c in self.private}
        return work_message(program.name, tasks, private, worker.sent_models)

    def _replace_worker(self, i: int) -> None:
        log.warning("worker %d died; another does its work again", i)
        self._workers[i].stop()
        self._workers[i] = self._start_worker()


@dataclass
class Worker:
    process: ForkProcess
    pipe: Connection
    sent_models: dict[int, int] = field(default_factory=dict)  # this round's models that it has: identity -> number

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _stop_workers(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()


def _run_worker(
    pipe: Connection,
    other_pipes: Sequence[Connection],
    programs: Mapping[str, ClientProgram],
    data: Mapping[ClientId, ClientData],
    make_fleet: FleetFactory,
    is_quiet: bool,
) -> None:
    """A worker's life: until the other end of its pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers
    for other in other_pipes:
        other.close()  # or a dead parent would look alive through a sibling's copy of its end
    torch.set_num_threads(1)
    if is_quiet:
        logging.disable(logging.WARNING)
    private: dict[ClientId, Tree] = {}
    models: dict[str, Params] = {}
    fleet = make_fleet(data, private)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        name, tasks, received_private = read_work(message, models)
        private.clear()
        private.update(received_private)
        try:
            reports = fleet.execute(Plan(programs[name], tasks))
            changed = {c: t for c, t in private.items() if t is not received_private.get(c)}
            pipe.send_bytes(reply_message(reports, changed))
        except Exception as error:  # any that the parent should hear of; dying is for what Python cannot catch
            message_text = str(error) if isinstance(error, ClientError) else f"{name}: {traceback.format_exc()}"
            pipe.send_bytes(pack({}, {"error": message_text}))


def work_message(
    program: str, tasks: Mapping[ClientId, Task], private: Mapping[ClientId, Tree], sent_models: dict[int, int]
) -> bytes:
    """Tasks name their models by number; only models that the worker does not know yet go along."""
    first = not sent_models
    models: dict[str, Params] = {}
    facts: dict[ClientId, Any] = {}
    for client, task in tasks.items():
        for model in task.models.values():
            if id(model) not in sent_models:
                sent_models[id(model)] = len(sent_models)
                models[str(sent_models[id(model)])] = model
        named = {name: str(sent_models[id(model)]) for name, model in task.models.items()}
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
