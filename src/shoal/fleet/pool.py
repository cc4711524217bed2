"""A fleet of worker processes, one per core with one thread each, which run the pieces of a plan.

- Workers are forked, so they read data and programs in the parent's memory. Nothing is copied, and there are no
  segments of shared memory that a crash could leave behind.
- The models of a round are sent to each worker once, even if many of its clients use them. Messages are the bytes of
  `shoal.codec`.
- Programs are pure. If a worker dies, its successor does the same piece again, with the same result.
- The pieces do not depend on the number of workers (see `shoal.fleet.dealing`), so any number gives the same bytes.
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
MAX_ATTEMPTS = 3  # for a piece; work that kills its worker every time is the cause itself, not the machine


def count_cores() -> int:
    """Returns the number of cores that this process may use, or 1 outside Linux, where forking is not safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


class PoolFleet:
    """Executes plans in worker processes.

    Parameters
    ----------
    method
        The method whose programs the workers run.
    data
        The data of the clients.
    private
        The private trees of the clients.
    make_fleet
        Creates the fleet of a worker: stacked clients for dense models, a plain fleet for convolutions.
    workers
        The number of workers. None for the number of cores. It has no influence on results.
    pieces
        The number of pieces of a plan. None for the number of cores. Results depend on it in the last bits.
    """

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
        """Returns all clients."""
        return self._roster

    def execute(self, plan: Plan) -> Mapping[ClientId, Report]:
        """Runs the tasks of the plan in the workers and returns the reports.

        Raises
        ------
        ClientError
            If a program fails, or if a piece kills its worker three times.
        """
        assert plan.program is not None
        self._add_program(plan.program)
        pieces = deal(plan, self.data, self._num_pieces)
        while len(self._workers) < min(self._num_workers, len(pieces)):
            self._workers.append(self._start_worker())
        for worker in self._workers:
            worker.sent_models.clear()  # models are known by their identity, which is valid for this plan only
        reports: dict[ClientId, Report] = {}
        try:
            for reply in self._replies(plan.program, pieces):
                piece_reports, private = read_reply(reply)
                reports |= piece_reports
                for client, private_tree in private.items():
                    self.private[client] = private_tree
        except BaseException:
            self.close()  # otherwise the next round would read replies to this one
            raise
        return {c: reports[c] for c in plan.tasks}

    def close(self) -> None:
        """Stops the workers. The next plan starts new ones."""
        _stop_workers(self._workers)

    def _add_program(self, program: ClientProgram) -> None:
        if self._programs.get(program.name) != program:
            self._programs[program.name] = program
            self.close()  # a worker has the programs that existed when it was forked

    def _start_worker(self) -> Worker:
        context = multiprocessing.get_context("fork")
        parent_end, worker_end = context.Pipe()
        others = [w.pipe for w in self._workers] + [parent_end]
        is_quiet = bool(self._workers)  # only the first worker logs warnings, because all would log the same ones
        arguments = (worker_end, others, self._programs, self.data, self._make_fleet, is_quiet)
        process = context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        worker_end.close()
        return Worker(process, parent_end)

    def _replies(self, program: ClientProgram, pieces: Sequence[Mapping[ClientId, Task]]) -> Iterator[bytes]:
        """Yields the replies in the order of arrival. A worker that dies is replaced, and its piece is done again."""
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
                if worker in piece_of_worker:  # it has the next piece, or the same piece again
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
        log.warning("Worker %d died. Another worker does its work again.", i)
        self._workers[i].stop()
        self._workers[i] = self._start_worker()


@dataclass
class Worker:
    """A worker process and the parent's end of its pipe."""

    process: ForkProcess
    pipe: Connection
    sent_models: dict[int, int] = field(default_factory=dict)  # models of this round: identity -> number in messages

    def stop(self) -> None:
        """Kills the process."""
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
    """Runs pieces until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the parent, which then stops its workers
    for other in other_pipes:
        other.close()  # otherwise the copy of this end would hide the death of the parent
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
        except Exception as error:  # the parent raises it; a worker dies only of what Python cannot catch
            message_text = str(error) if isinstance(error, ClientError) else f"{name}: {traceback.format_exc()}"
            pipe.send_bytes(pack({}, {"error": message_text}))


def work_message(
    program: str, tasks: Mapping[ClientId, Task], private: Mapping[ClientId, Tree], sent_models: dict[int, int]
) -> bytes:
    """Returns the message with the tasks of a piece.

    Tasks refer to their models by number. The message contains only the models that the worker has not received yet.

    Parameters
    ----------
    program
        The name of the program.
    tasks
        The tasks of the piece.
    private
        The private trees of its clients.
    sent_models
        The models that the worker has: identity to number. The models of this message are added.
    """
    first = not sent_models
    models: dict[str, Params] = {}
    facts: dict[ClientId, Any] = {}
    for client, task in tasks.items():
        for model in task.models.values():
            if id(model) not in sent_models:
                sent_models[id(model)] = len(sent_models)
                models[str(sent_models[id(model)])] = model
        number_by_name = {name: str(sent_models[id(model)]) for name, model in task.models.items()}
        facts[client] = [number_by_name, dict(task.config), task.seed]
    meta = {"program": program, "tasks": list(facts.items()), "first": first}
    return pack({"models": models, "private": dict(private)}, meta)


def read_work(message: bytes, models: dict[str, Params]) -> tuple[str, dict[ClientId, Task], dict[ClientId, Tree]]:
    """Returns the program name, the tasks and the private trees of a message from `work_message`.

    Parameters
    ----------
    message
        The message.
    models
        The models that the worker has received in this round, by number. The models of the message are added.
    """
    t, meta = unpack(message)
    if meta["first"]:
        models.clear()
    models |= t.get("models", {})
    tasks = {
        client: Task({name: models[number] for name, number in number_by_name.items()}, config, seed)
        for client, (number_by_name, config, seed) in meta["tasks"]
    }
    return meta["program"], tasks, t.get("private", {})


def reply_message(reports: Mapping[ClientId, Report], private: Mapping[ClientId, Tree]) -> bytes:
    """Returns the message with the reports of a piece and the private trees that changed."""
    facts = {c: [{k: list(v) for k, v in r.metrics.items()}, dict(r.counts), r.flops] for c, r in reports.items()}
    tensors = {c: dict(r.tensors) for c, r in reports.items()}
    return pack({"tensors": tensors, "private": dict(private)}, {"reports": facts})


def read_reply(message: bytes) -> tuple[dict[ClientId, Report], dict[ClientId, Tree]]:
    """Returns the reports and the changed private trees of a message from a worker.

    Raises
    ------
    ClientError
        If a program failed in the worker.
    """
    t, meta = unpack(message)
    if "error" in meta:
        raise ClientError(meta["error"])
    tensors = t.get("tensors", {})
    reports = {
        c: Report(tensors.get(c, {}), {k: (s, n) for k, (s, n) in metrics.items()}, counts, flops)
        for c, (metrics, counts, flops) in meta["reports"].items()
    }
    return reports, t.get("private", {})
