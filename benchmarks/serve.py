"""Measures the predictions per second of a server on one core, with and without batches, while models are replaced.

The server has one core, and the load comes from another core: 64 callers, each with its own connection, which request
the prediction of one sample after the other. Two servers of the same run take turns, one that gathers requests into
batches and one that does not, so that other programs affect both equally. A server that fails is a row with the reason,
and the other one continues. Writes `results/serve.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil
from harness import FAILED, OK, Outcome

from shoal.experiment.job import Job
from shoal.experiment.run import run_job
from shoal.store.checkpoint import Checkpoints

START_TIMEOUT_S = 120  # a server must listen by then
SERVERS = {
    "gathered": ("--max-batch-samples", "64", "--max-wait-ms", "2"),
    "one by one": ("--max-batch-samples", "1", "--max-wait-ms", "0"),
}


@dataclass(frozen=True)
class Load:
    """The load on the servers."""

    requests: Sequence[bytes]  # one for each caller
    seconds: float  # for each server, in all turns together
    turns: int
    warm_s: float  # at the start of each turn, not counted

    @property
    def turn_s(self) -> float:
        return self.seconds / self.turns


@dataclass
class Server:
    """A server process, and its measurements."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int | None = None
    outcome: Outcome = field(default_factory=lambda: Outcome(OK))
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_responses: int = 0  # includes the warm-up
    cpu_s: float = 0.0  # of the server, for all responses
    num_errors: int = 0
    rounds: set[int] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)

    @property
    def is_ok(self) -> bool:
        return self.outcome.status == OK

    def await_port(self) -> None:
        """Waits until the server prints its address."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            for line in self.log.read_text().splitlines(keepends=True):
                if " on http" in line and line.endswith("\n"):
                    self.port = int(line.strip().rpartition(":")[2])
                    return
            time.sleep(0.02)
        self.fail("did not start")

    def fail(self, problem: str) -> None:
        code, words = self.process.poll(), harness.last_words(self.log.read_text())
        if code is not None:
            problem += f" (ended by {harness.signal_name(-code)})" if code < 0 else f" (exit code {code})"
        self.outcome = Outcome(FAILED, f"{problem}: {words}" if words else problem)

    def total_cpu_s(self) -> float:
        """Returns the processor time of the server, which a busy machine affects less than the clock."""
        cpu_times = psutil.Process(self.process.pid).cpu_times()
        return cpu_times.user + cpu_times.system

    def row(self) -> dict[str, Any]:
        ms = 1000 * np.array(self.latencies_s)
        is_complete = self.is_ok and self.seconds > 0  # an interrupted turn has responses, but no duration
        if self.is_ok and not len(ms):
            self.fail("responded to no request")
        if self.is_ok and self.num_errors:
            self.fail(f"{self.num_errors} requests failed")
        return self.outcome.row | {
            "requests": len(ms),
            "per_s": len(ms) / self.seconds if is_complete else None,
            "server_cpu_ms": 1000 * self.cpu_s / self.num_responses if is_complete and self.num_responses else None,
            "p50_ms": float(np.percentile(ms, 50)) if len(ms) else None,
            "p99_ms": float(np.percentile(ms, 99)) if len(ms) else None,
            "errors": self.num_errors,
            "rounds": sorted(self.rounds),
            "experts": len(self.experts),
        }


# fce predicts with all models of an ensemble, by one of two rules, and ifca with the model of the caller's cluster
METHODS: dict[str, dict[str, dict[str, object]]] = {
    "fce": {},
    "fce-density": {"serve": {"rule": "density"}},
    "ifca": {"cluster": {"num_clusters": 8}},
}


def make_run(run: Path, name: str, clients: int, rounds: int) -> None:
    job = {"partition": "labels:0-1/2-3/4-5/6-7/8-9", "clients": clients, "cohort": clients // 2, "rounds": rounds}
    run_job(Job(method=name.partition("-")[0], set=METHODS[name], fleet="vector", **job), run)


def start(run: Path, name: str, core: int) -> Server:
    options = ("--port", "0", "--max-requests-per-s", "0", "--poll-s", "0.2", *SERVERS[name])
    log = run.parent / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "serve", str(run), *options],
            stdout=subprocess.DEVNULL,
            stderr=out,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    return Server(process, log)


def make_requests(method: str, callers: int, clients: int) -> list[bytes]:
    """Returns the request of each caller, with the name of a client if clients have different models."""
    samples = np.random.default_rng(0).integers(0, 17, (callers, 8, 8)).tolist()
    width = len(str(clients - 1))
    names = [f"?client=c{i % clients:0{width}d}" if method == "ifca" else "" for i in range(callers)]
    return [request(f"/v1/predict{name}", sample) for name, sample in zip(names, samples, strict=True)]


def request(path: str, sample: object) -> bytes:
    body = json.dumps({"samples": sample}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def call(server: Server, request_bytes: bytes, count_from_s: float, until_s: float) -> None:
    """Sends requests without a library for HTTP, because the load must cost less than the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    while (start_s := time.perf_counter()) < until_s:
        try:
            writer.write(request_bytes)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            server.num_errors += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            continue
        server.num_responses += 1
        if not head.startswith(b"HTTP/1.1 200"):
            server.num_errors += 1
        elif start_s >= count_from_s:
            server.latencies_s.append(time.perf_counter() - start_s)
            if len(server.latencies_s) % 50 == 1:  # reading all responses would slow the load down
                response = json.loads(body)
                server.rounds.add(response["round"])
                server.experts.add(response["predictions"][0]["expert"])
    writer.close()


async def take_turn(server: Server, load: Load) -> None:
    try:
        cpu_before_s, count_from_s = server.total_cpu_s(), time.perf_counter() + load.warm_s
        callers = (call(server, data, count_from_s, count_from_s + load.turn_s) for data in load.requests)
        for error in await asyncio.gather(*callers, return_exceptions=True):
            if error is not None:
                raise error
        server.cpu_s += server.total_cpu_s() - cpu_before_s
        server.seconds += load.turn_s
    except (OSError, psutil.Error) as error:  # no new connection, or no process
        server.fail(f"stopped responding: {error}")


async def add_round(run: Path, after_s: float) -> None:
    """Adds a checkpoint, as a training that runs next to the service does."""
    await asyncio.sleep(after_s)
    checkpoints = Checkpoints(run / "checkpoints")
    state = checkpoints.load(checkpoints.rounds()[-1]).state
    checkpoints.save(replace(state, round=state.round + 1), [])
    checkpoints.discard_old()


async def measure(run: Path, servers: Mapping[str, Server], load: Load) -> None:
    for n in range(load.turns):
        for name, server in servers.items():
            if not server.is_ok:
                continue
            swap = add_round(run, load.warm_s + load.turn_s / 2) if n % 2 else asyncio.sleep(0)
            await asyncio.gather(take_turn(server, load), swap)
            print(f"turn {n + 1}/{load.turns}  {name}: {len(server.latencies_s):,} responses so far", file=sys.stderr)


def serve_and_measure(folder: Path, method: str, clients: int, rounds: int, load: Load, cores: Sequence[int]) -> Any:
    """Returns a row for each server."""
    make_run(folder / "run", method, clients, rounds)
    server_core, load_core = cores
    servers = {name: start(folder / "run", name, server_core) for name in SERVERS}
    try:
        for server in servers.values():
            server.await_port()
        os.sched_setaffinity(0, {load_core})
        asyncio.run(measure(folder / "run", servers, load))
        return [{"server": name, **server.row()} for name, server in servers.items()]
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(30)


def two_cores(text: str) -> tuple[int, int]:
    """Reads two usable cores such as 0,1."""
    numbers = [int(n) for n in text.split(",") if n.strip().isdigit()]
    usable = sorted(os.sched_getaffinity(0))
    if len(numbers) != 2 or not set(numbers) <= set(usable):
        raise argparse.ArgumentTypeError(f"{text!r} must be two of the usable cores {usable} with a comma between them")
    return numbers[0], numbers[1]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usable = sorted(os.sched_getaffinity(0))
    add, positive = parser.add_argument, harness.parse_positive
    add(
        "--seconds",
        type=harness.parse_seconds,
        default=60.0,
        help="Seconds per server in all turns. Default: 60.",
    )
    add("--method", choices=METHODS, default="ifca", help="Method whose run is served. Default: ifca.")
    add(
        "--cores",
        type=two_cores,
        default=(usable[0], usable[:2][-1]),
        help="Core of the server and core of the load, such as 0,1.",
    )
    add("--callers", type=positive, default=64, help="Connections, with one request at a time each. Default: 64.")
    add(
        "--turns",
        type=positive,
        default=4,
        help="Turns of each server. Every second turn adds a round to the run. Default: 4.",
    )
    add("--warm-s", type=harness.parse_seconds, default=2.0, help="Seconds of a turn that are not counted. Default: 2.")
    add("--clients", type=positive, default=40, help="Clients of the run, at least 5. Default: 40.")
    add("--rounds", type=positive, default=6, help="Rounds of the run. Default: 6.")
    return parser


def main() -> int:
    tiny = {"seconds": 0.6, "callers": 2, "turns": 2, "warm_s": 0.1, "clients": 5, "rounds": 1}
    options, run = harness.begin(make_parser(), "serve.json", tiny)
    requests = make_requests(options.method, options.callers, options.clients)
    load = Load(requests, options.seconds, options.turns, options.warm_s)
    folder = Path(tempfile.mkdtemp())
    try:
        rows = serve_and_measure(folder, options.method, options.clients, options.rounds, load, options.cores)
    finally:
        shutil.rmtree(folder)
    rates = [row["per_s"] for row in rows]
    gain = rates[0] / rates[1] if all(rates) else None
    run.write(model="mlp", gathered_over_one_by_one=gain, rows=rows)
    print(json.dumps({"gathered_over_one_by_one": gain, "rows": rows}, indent=1))
    return int(any(row["status"] != OK for row in rows))


if __name__ == "__main__":
    harness.call(main)
