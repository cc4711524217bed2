"""How many predictions a second one core serves, what gathering requests gains, and that new models hurt nobody.

The server has one core to itself, the load comes from another: 64 callers, each with a connection that it keeps, each
asking for one row and, once it is answered, for the next. Two servers of the same run take turns, one that gathers
requests and one that does not, so that both meet the same neighbours on a shared machine.
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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil

from shoal.experiment.job import Job
from shoal.experiment.run import run_job
from shoal.store.checkpoint import Checkpoints

RESULT = Path(__file__).parent / "results/serve.json"
CALLERS, TURNS, WARM_S = 64, 4, 2.0
SERVERS = {
    "gathered": ("--max-batch", "64", "--max-wait-ms", "2"),
    "one by one": ("--max-batch", "1", "--max-wait-ms", "0"),
}


@dataclass
class Seen:
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    answered: int = 0  # also while it grows warm
    cpu_s: float = 0.0  # of the server, for these
    errors: int = 0
    rounds: set[int] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)

    def figures(self) -> dict[str, object]:
        ms = 1000 * np.array(self.latencies_s)
        return {
            "requests": len(ms),
            "per_s": len(ms) / self.seconds,
            "server_cpu_ms": 1000 * self.cpu_s / self.answered,
            "p50_ms": float(np.percentile(ms, 50)),
            "p99_ms": float(np.percentile(ms, 99)),
            "errors": self.errors,
            "rounds": sorted(self.rounds),
            "experts": len(self.experts),
        }


# all models of an ensemble look at every row, by one rule or the other; or each caller has its cluster's model
METHODS: dict[str, dict[str, dict[str, object]]] = {
    "fce": {},
    "fce-density": {"serve": {"rule": "density"}},
    "ifca": {"cluster": {"groups": 8}},
}


def make_run(place: Path, name: str) -> None:
    method, labels = name.partition("-")[0], "labels:0-1/2-3/4-5/6-7/8-9"
    run_job(Job(method=method, partition=labels, clients=40, cohort=20, rounds=6, set=METHODS[name]), place)


def start(run: Path, options: tuple[str, ...], core: int) -> tuple[subprocess.Popen[str], int]:
    command = [
        sys.executable,
        "-m",
        "shoal",
        "serve",
        str(run),
        "--port",
        "0",
        "--rate",
        "0",
        "--poll-s",
        "0.2",
        *options,
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " on http" in line:
            return process, int(line.strip().rpartition(":")[2])
    raise RuntimeError("the server did not start")


def request(path: str, row: object) -> bytes:
    body = json.dumps({"rows": row}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def caller(port: int, sent: bytes, until: float, seen: Seen, counted: float) -> None:
    """By hand, not with a library for HTTP: the load must cost less than what it measures."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begun := time.perf_counter()) < until:
        try:
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            seen.errors += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        seen.answered += 1
        if not head.startswith(b"HTTP/1.1 200"):
            seen.errors += 1
        elif begun >= counted:
            seen.latencies_s.append(time.perf_counter() - begun)
            if len(seen.latencies_s) % 50 == 0:  # a look now and then: to read all would slow the load down
                said = json.loads(body)
                seen.rounds.add(said["round"])
                seen.experts.add(said["answers"][0]["expert"])
    writer.close()


async def turn(port: int, requests: list[bytes], seconds: float, seen: Seen, swap: asyncio.Task[None] | None) -> None:
    counted = time.perf_counter() + WARM_S
    until = counted + seconds
    await asyncio.gather(*(caller(port, sent, until, seen, counted) for sent in requests))
    seen.seconds += seconds
    if swap is not None:
        await swap


async def add_round(run: Path, after_s: float) -> None:
    """As a training beside the service does."""
    await asyncio.sleep(after_s)
    checkpoints = Checkpoints(run / "checkpoints")
    state = checkpoints.load(checkpoints.rounds()[-1]).state
    checkpoints.save(replace(state, round=state.round + 1), [])
    checkpoints.discard_old()


def cpu_s(process: subprocess.Popen[str]) -> float:
    """What a server has computed: on a busy machine this says more than the clock."""
    spent = psutil.Process(process.pid).cpu_times()
    return spent.user + spent.system


async def measured(
    run: Path, servers: Mapping[str, tuple[subprocess.Popen[str], int]], requests: list[bytes], seconds: float
) -> dict[str, Seen]:
    seen = {name: Seen() for name in servers}
    for n in range(TURNS):
        for name, (process, port) in servers.items():
            swap = asyncio.create_task(add_round(run, WARM_S + seconds / TURNS / 2)) if n % 2 else None
            before = cpu_s(process)
            await turn(port, requests, seconds / TURNS, seen[name], swap)
            seen[name].cpu_s += cpu_s(process) - before
            print(f"turn {n + 1}/{TURNS}  {name}: {len(seen[name].latencies_s):,} answers so far", file=sys.stderr)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for each of the two servers, in four turns")
    parser.add_argument("--method", choices=METHODS, default="ifca", help="what is served")
    parser.add_argument("--cores", default="0,1", help="the server's, and that of the load")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    of_server, of_load = (int(core) for core in options.cores.split(","))
    folder = Path(tempfile.mkdtemp())
    make_run(folder / "run", options.method)
    rows = np.random.default_rng(0).integers(0, 17, (CALLERS, 8, 8)).tolist()
    paths = [f"/v1/predict?client=c{i % 40:02d}" if options.method == "ifca" else "/v1/predict" for i in range(CALLERS)]
    requests = [request(path, row) for path, row in zip(paths, rows, strict=True)]
    load_before = os.getloadavg()[0]
    servers = {name: start(folder / "run", how, of_server) for name, how in SERVERS.items()}
    try:
        os.sched_setaffinity(0, {of_load})
        seen = asyncio.run(measured(folder / "run", servers, requests, options.seconds))
    finally:
        for process, _ in servers.values():
            process.terminate()
            process.wait(30)
        shutil.rmtree(folder)
    figures = {name: s.figures() for name, s in seen.items()}
    rates = {name: float(str(f["per_s"])) for name, f in figures.items()}
    result = {
        "method": options.method,
        "model": "mlp",
        "callers": CALLERS,
        "seconds": options.seconds,
        "servers": figures,
        "gathered_over_one_by_one": rates["gathered"] / rates["one by one"],
        "cores": os.cpu_count(),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
    }
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(json.dumps(result, indent=1, sort_keys=True))
    assert all(f["errors"] == 0 for f in figures.values()), "a request failed"


if __name__ == "__main__":
    main()
