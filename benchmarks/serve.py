"""How many predictions a second one core serves, what gathering requests gains, and that new models hurt nobody.

The server has one core to itself, the load comes from another: 64 callers, each with a connection that it keeps, each
asking for one row and, once it is answered, for the next. Two servers of the same run take turns, one that gathers
requests and one that does not, so that both meet the same neighbours on a shared machine. A server that fails is a row
with the reason, and the other one goes on. Writes `results/serve.json`.
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

START_TIMEOUT_S = 120  # seconds within which a server must listen
SERVERS = {
    "gathered": ("--max-batch", "64", "--max-wait-ms", "2"),
    "one by one": ("--max-batch", "1", "--max-wait-ms", "0"),
}


@dataclass(frozen=True)
class Load:
    """How the servers are asked."""

    requests: Sequence[bytes]  # of each caller
    seconds: float  # for each server, in all turns together
    turns: int
    warm_s: float  # at the start of each turn, not counted

    @property
    def turn_s(self) -> float:
        return self.seconds / self.turns


@dataclass
class Server:
    """A server process, and what was seen of it."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int | None = None
    outcome: Outcome = field(default_factory=lambda: Outcome(OK))
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_answers: int = 0  # also while it grows warm
    cpu_s: float = 0.0  # of the server, for these
    num_errors: int = 0
    rounds: set[int] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)

    @property
    def is_ok(self) -> bool:
        return self.outcome.status == OK

    def await_port(self) -> None:
        """Waits until the server says where it listens."""
        until = time.monotonic() + START_TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < until:
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
        """What the server has computed: on a busy machine this says more than the clock."""
        spent = psutil.Process(self.process.pid).cpu_times()
        return spent.user + spent.system

    def row(self) -> dict[str, Any]:
        ms = 1000 * np.array(self.latencies_s)
        is_whole = self.is_ok and self.seconds > 0  # a turn that broke off has answers, but no duration
        if self.is_ok and not len(ms):
            self.fail("answered no request")
        if self.is_ok and self.num_errors:
            self.fail(f"{self.num_errors} requests failed")
        return self.outcome.row | {
            "requests": len(ms),
            "per_s": len(ms) / self.seconds if is_whole else None,
            "server_cpu_ms": 1000 * self.cpu_s / self.num_answers if is_whole and self.num_answers else None,
            "p50_ms": float(np.percentile(ms, 50)) if len(ms) else None,
            "p99_ms": float(np.percentile(ms, 99)) if len(ms) else None,
            "errors": self.num_errors,
            "rounds": sorted(self.rounds),
            "experts": len(self.experts),
        }


# all models of an ensemble look at every row, by one rule or the other; or each caller has its cluster's model
METHODS: dict[str, dict[str, dict[str, object]]] = {
    "fce": {},
    "fce-density": {"serve": {"rule": "density"}},
    "ifca": {"cluster": {"groups": 8}},
}


def make_run(run: Path, name: str, clients: int, rounds: int) -> None:
    job = {"partition": "labels:0-1/2-3/4-5/6-7/8-9", "clients": clients, "cohort": clients // 2, "rounds": rounds}
    run_job(Job(method=name.partition("-")[0], set=METHODS[name], fleet="vector", **job), run)


def start(run: Path, name: str, core: int) -> Server:
    options = ("--port", "0", "--rate", "0", "--poll-s", "0.2", *SERVERS[name])
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
    """Returns the request of each caller, which asks as a client where clients have models of their own."""
    rows = np.random.default_rng(0).integers(0, 17, (callers, 8, 8)).tolist()
    width = len(str(clients - 1))
    names = [f"?client=c{i % clients:0{width}d}" if method == "ifca" else "" for i in range(callers)]
    return [request(f"/v1/predict{name}", row) for name, row in zip(names, rows, strict=True)]


def request(path: str, row: object) -> bytes:
    body = json.dumps({"rows": row}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def call(server: Server, request_bytes: bytes, count_from: float, until: float) -> None:
    """By hand, not with a library for HTTP: the load must cost less than what it measures."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    while (begun := time.perf_counter()) < until:
        try:
            writer.write(request_bytes)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            server.num_errors += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            continue
        server.num_answers += 1
        if not head.startswith(b"HTTP/1.1 200"):
            server.num_errors += 1
        elif begun >= count_from:
            server.latencies_s.append(time.perf_counter() - begun)
            if len(server.latencies_s) % 50 == 1:  # a look now and then: to read all would slow the load down
                answer = json.loads(body)
                server.rounds.add(answer["round"])
                server.experts.add(answer["answers"][0]["expert"])
    writer.close()


async def take_turn(server: Server, load: Load) -> None:
    try:
        before, counted = server.total_cpu_s(), time.perf_counter() + load.warm_s
        callers = (call(server, sent, counted, counted + load.turn_s) for sent in load.requests)
        for error in await asyncio.gather(*callers, return_exceptions=True):
            if error is not None:
                raise error
        server.cpu_s += server.total_cpu_s() - before
        server.seconds += load.turn_s
    except (OSError, psutil.Error) as error:  # no new connection, or no process: the server is gone
        server.fail(f"stopped answering: {error}")


async def add_round(run: Path, after_s: float) -> None:
    """As a training beside the service does."""
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
            print(f"turn {n + 1}/{load.turns}  {name}: {len(server.latencies_s):,} answers so far", file=sys.stderr)


def serve_and_measure(folder: Path, method: str, clients: int, rounds: int, load: Load, cores: Sequence[int]) -> Any:
    """Returns a row for each server."""
    make_run(folder / "run", method, clients, rounds)
    of_server, of_load = cores
    servers = {name: start(folder / "run", name, of_server) for name in SERVERS}
    try:
        for server in servers.values():
            server.await_port()
        os.sched_setaffinity(0, {of_load})
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
    add, positive = parser.add_argument, harness.require_positive
    add("--seconds", type=harness.seconds, default=60.0, help="For each server, in all turns together. Default: 60.")
    add("--method", choices=METHODS, default="ifca", help="Method whose run is served. Default: ifca.")
    add("--cores", type=two_cores, default=(usable[0], usable[:2][-1]), help="The server's core, and that of the load.")
    add("--callers", type=positive, default=64, help="Connections with one request each at a time. Default: 64.")
    add("--turns", type=positive, default=4, help="Turns of each server. In every second one the run gains a round.")
    add("--warm-s", type=harness.seconds, default=2.0, help="Seconds of a turn that are not counted. Default: 2.")
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
