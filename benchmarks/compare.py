"""Compares shoal with Flower's simulation, Apple's pfl and a PyTorch loop on the same work.

Every peer runs in its own process, one after the other, in several turns, so that a busy machine affects all of them
equally. The results are ratios of medians. After two rounds all peers must have the same weights, which shows that the
work is the same. A peer that fails is a row with the reason, and the others continue. Writes `results/peers.json` and
`results/peers.png`. `--peer` also measures a program of your own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import work
from harness import FAILED, OK, Outcome
from torch.utils.flop_counter import FlopCounterMode
from work import Work

ADVICE = "pip install -r benchmarks/requirements.txt"
NUM_WARMUP_ROUNDS = 2  # not counted, because of imports, first allocations and recording
MAX_WEIGHT_DIFFERENCE = 1e-4  # after two rounds; later, another order of sums makes any training differ


@dataclass(frozen=True)
class Peer:
    """A program that does the work: it is called with a folder, the number of rounds, its name, and its options."""

    title: str
    command: tuple[str, ...]
    required_modules: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def python_command(script: str) -> tuple[str, ...]:
    return sys.executable, str(harness.HERE / "peers" / script)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", str(harness.cores()), "--standalone")
PEERS = {
    "shoal": Peer("shoal", python_command("with_shoal.py")),
    "bare": Peer("PyTorch loop", python_command("with_torch.py")),
    "pfl": Peer("pfl, 1 process", python_command("with_pfl.py"), ("pfl",)),
    "pfl-processes": Peer(
        f"pfl, {harness.cores()} processes", (sys.executable, *TORCHRUN, python_command("with_pfl.py")[1]), ("pfl",)
    ),
    "flower": Peer("Flower simulation", python_command("with_flower.py"), ("flwr", "ray")),
    "flower-tuned": Peer("Flower, 1 CPU/client", python_command("with_flower.py"), ("flwr", "ray"), ("1",)),
}


@dataclass
class Measurement:
    """The measurements of a peer, up to its failure if it failed."""

    outcome: Outcome = field(default_factory=lambda: Outcome(OK))
    weights_differ_by: float | None = None
    round_s: list[float] = field(default_factory=list)
    first_round_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return self.outcome.status == OK

    def add(self, began: float, ended: float, round_ends: list[float]) -> None:
        self.whole_s.append(ended - began)
        self.first_round_s.append(round_ends[0] - began)
        self.round_s += [
            b - a for a, b in zip(round_ends[NUM_WARMUP_ROUNDS - 1 :], round_ends[NUM_WARMUP_ROUNDS:], strict=False)
        ]

    def row(self) -> dict[str, Any]:
        """Returns the medians, which are None if nothing was measured."""
        return self.outcome.row | {
            "turns": len(self.whole_s),
            "per_round_s": median(self.round_s),
            "per_round_range_s": [min(self.round_s), max(self.round_s)] if self.round_s else None,
            "until_first_round_s": median(self.first_round_s),
            "whole_s": median(self.whole_s),
            "weights_differ_by": self.weights_differ_by,
        }


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass(frozen=True)
class Comparison:
    """The measurement of all peers on one work, whose files are in the folder."""

    peers: Mapping[str, Peer]
    folder: Path
    timeout_s: float
    measurements: dict[str, Measurement]

    def run(self, rounds: int, turns: int) -> None:
        """Checks the weights in a short run, then measures. A measurement that is short itself is its own check."""
        is_short = rounds <= NUM_WARMUP_ROUNDS + 1
        for name in self.peers:
            self.turn(name, rounds if is_short else NUM_WARMUP_ROUNDS, is_counted=is_short)
            self.check_weights(name)
        for turn in range(0 if is_short else turns):
            for name in [n for n in self.peers if self.measurements[n].is_ok]:
                print(f"{self.peers[name].title}: {rounds} rounds, turn {turn + 1} of {turns}", file=sys.stderr)
                self.turn(name, rounds, is_counted=True)

    def turn(self, name: str, rounds: int, is_counted: bool) -> None:
        """Runs a peer once. A failure is recorded, and the peer does not run again."""
        peer, measurement = self.peers[name], self.measurements[name]
        result = self.folder / f"{name}.json"
        result.unlink(missing_ok=True)
        began = time.time()
        outcome = harness.missing(peer.required_modules, ADVICE) or self.start(name, rounds)
        ended = time.time()
        if outcome.status == OK:
            try:
                round_ends = [float(t) for t in json.loads(result.read_text())["round_ends"]]
            except (OSError, ValueError, KeyError, TypeError):
                round_ends = []
            if len(round_ends) != rounds:
                outcome = Outcome(FAILED, f"left the ends of {len(round_ends)} rounds, not of {rounds}")
        measurement.outcome = outcome
        if outcome.status != OK:
            print(f"{peer.title}: {outcome.reason}", file=sys.stderr)
        elif is_counted:
            measurement.add(began, ended, round_ends)

    def start(self, name: str, rounds: int) -> Outcome:
        peer = self.peers[name]
        # Peers import `work`, and some of them are in other folders.
        environment = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": python_path()}
        command = [*peer.command, str(self.folder), str(rounds), name, *peer.options]
        return harness.run_process(command, self.timeout_s, environment)

    def check_weights(self, name: str) -> None:
        """Fails a peer whose weights differ from those of shoal, because it did other work."""
        if not (self.measurements[name].is_ok and self.measurements["shoal"].is_ok):
            return
        try:
            differ_by = difference(self.folder / "shoal.npz", self.folder / f"{name}.npz")
        except Exception as error:  # whatever a peer wrote, the others continue
            self.measurements[name] = Measurement(Outcome(FAILED, f"left no weights to compare: {error}"))
            return
        self.measurements[name].weights_differ_by = differ_by
        if not differ_by <= MAX_WEIGHT_DIFFERENCE:
            reason = f"did other work: its weights differ from shoal's by {differ_by:.2g}"
            self.measurements[name] = Measurement(Outcome(FAILED, reason), differ_by)


def python_path() -> str:
    """Returns a PYTHONPATH with this folder first."""
    return os.pathsep.join(filter(None, [str(harness.HERE), os.environ.get("PYTHONPATH")]))


def difference(one: Path, other: Path) -> float:
    """Returns the largest difference of two sets of weights."""
    ours, theirs = np.load(one), np.load(other)
    return max(float(np.abs(ours[k] - theirs[k]).max()) for k in ours.files)


def compare(spec: Work, peers: Mapping[str, Peer], rounds: int, turns: int, timeout_s: float) -> list[dict[str, Any]]:
    """Returns a row for each peer."""
    with tempfile.TemporaryDirectory() as folder:
        work.prepare(spec, Path(folder), rounds)
        comparison = Comparison(peers, Path(folder), timeout_s, {name: Measurement() for name in peers})
        comparison.run(rounds, turns)
    return [
        {"work": spec.name, "rounds": rounds, "peer": name, "title": peers[name].title, **measurement.row()}
        for name, measurement in comparison.measurements.items()
    ]


def multiply_rate(size: int) -> float:
    """Returns the floating-point operations per second of large matrix products on all cores (median)."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(200):
        start_s = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start_s)
    return 2 * size**3 / statistics.median(seconds)


def operations(spec: Work) -> int:
    """Returns the floating-point operations of one round, counted in one step."""
    net = work.make_network(spec)
    x, y = torch.randn(spec.batch_size, *spec.shape), torch.zeros(spec.batch_size, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(net(x), y).backward()
    return counter.get_total_flops() * spec.num_steps


def add_ratios(rows: list[dict[str, Any]], operations: int, rate: float) -> None:
    """Adds to each row the ratio to shoal's seconds, and the fraction of the multiplication rate."""
    shoal = rows[0]
    for row in rows:
        row["times_shoal"] = ratio(row["per_round_s"], shoal["per_round_s"])
        row["whole_times_shoal"] = ratio(row["whole_s"], shoal["whole_s"])
        row["share_of_multiply_rate"] = ratio(operations / rate, row["per_round_s"])


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def table(rows: list[dict[str, Any]]) -> str:
    rounds = f"{rows[0]['rounds']} rounds"
    lines = [
        f"{rows[0]['work']:22} {'s/round':>8} {'/shoal':>8} {rounds:>10} {'/shoal':>8} {'of GEMM':>8} {'weights':>8}"
    ]
    for row in rows:
        cells = [
            cell(row["per_round_s"], "8.3f"),
            cell(row["times_shoal"], "7.1f", "x"),
            cell(row["whole_s"], "9.1f", "s"),
            cell(row["whole_times_shoal"], "7.1f", "x"),
            cell(row["share_of_multiply_rate"], "8.2f"),
            cell(row["weights_differ_by"], "8.0e"),
        ]
        lines.append(f"{row['title']:22} {' '.join(cells)}  {row['reason'] or ''}".rstrip())
    return "\n".join([*lines, ""])


def cell(value: float | None, form: str, unit: str = "") -> str:
    width = int(form.split(".")[0]) + len(unit)
    return " " * width if value is None else f"{value:{form}}{unit}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the seconds per round of the peers that have any."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    works = list(dict.fromkeys(row["work"] for row in rows))
    plot, panes = plt.subplots(1, len(works), figsize=(5 * len(works), 3), layout="constrained", squeeze=False)
    for pane, name in zip(panes[0], works, strict=True):
        shown = [row for row in reversed(rows) if row["work"] == name and row["per_round_s"] is not None]
        bars = pane.barh(
            [row["title"] for row in shown],
            [row["per_round_s"] for row in shown],
            color=["#0072b2" if row["peer"] == "shoal" else "#b0b0b0" for row in shown],
        )
        times = ["" if row["times_shoal"] is None else f" ({row['times_shoal']:.1f}x)" for row in shown]
        pane.bar_label(bars, [f" {row['per_round_s']:.2f} s{t}" for row, t in zip(shown, times, strict=True)])
        pane.set_title(f"{name}: seconds per round, warm", loc="left", fontsize=10)
        pane.margins(x=0.35)
        pane.spines[["top", "right"]].set_visible(False)
    harness.write_atomically(path, lambda temporary_path: plot.savefig(temporary_path, dpi=130))
    print(f"written: {path}", file=sys.stderr)


def parse_own_peers(parser: argparse.ArgumentParser, texts: Sequence[str]) -> dict[str, Peer]:
    """Reads texts such as NAME=COMMAND."""
    peers: dict[str, Peer] = {}
    for text in texts:
        name, _, command = text.partition("=")
        try:
            words = tuple(shlex.split(command))
        except ValueError:  # an unpaired quotation mark
            words = ()
        if not re.fullmatch(r"[\w-]+", name) or not words:
            parser.error(f"--peer is {text!r}; it must be NAME=COMMAND, such as mine='python mine.py'.")
        if name in (*PEERS, *peers, "data", "first", "work"):  # the last three are names of files of the work
            parser.error(f"--peer is {text!r}, but the name {name!r} is taken. Choose another name.")
        peers[name] = Peer(name, words)
    return peers


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--works", nargs="+", default=list(work.WORKS), choices=list(work.WORKS), help="Works to do. Default: all.")
    add("--only", nargs="+", default=list(PEERS), choices=list(PEERS), help="Peers to measure. Default: all.")
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="Also measure this program. It is called with FOLDER ROUNDS NAME, like the programs in peers/.",
    )
    add(
        "--rounds",
        type=harness.parse_positive,
        default=20,
        help="Rounds of the MLP. The CNN runs a third of them. Default: 20.",
    )
    add("--turns", type=harness.parse_positive, default=2, help="Number of measurements of each peer. Default: 2.")
    add(
        "--timeout-s",
        type=harness.parse_seconds,
        default=1800,
        help="Seconds after which a peer is ended. Default: 1800.",
    )
    return parser


def main() -> int:
    parser = make_parser()
    options, run = harness.begin(parser, "peers.json", {"works": ["mlp"], "rounds": NUM_WARMUP_ROUNDS + 1})
    if options.rounds <= NUM_WARMUP_ROUNDS:
        parser.error(
            f"--rounds is {options.rounds}, but {NUM_WARMUP_ROUNDS} rounds are not counted. "
            f"Ask for {NUM_WARMUP_ROUNDS + 1} or more."
        )
    names = ["shoal", *(name for name in PEERS if name in options.only and name != "shoal")]
    peers = {name: PEERS[name] for name in names} | parse_own_peers(parser, options.peer)
    works = work.TINY_WORKS if options.tiny else work.WORKS
    rate, rows = multiply_rate(64 if options.tiny else 1024), []
    for name in options.works:
        rounds = options.rounds if name == "mlp" else max(NUM_WARMUP_ROUNDS + 1, options.rounds // 3)
        work_rows = compare(works[name], peers, rounds, options.turns, options.timeout_s)
        add_ratios(work_rows, operations(works[name]), rate)
        print(table(work_rows), flush=True)
        rows += work_rows
    run.write(multiply_rate_gflops=rate / 1e9, rows=rows)
    if absent := harness.missing(["matplotlib"], ADVICE):
        print(f"no plot: {absent.reason}", file=sys.stderr)
    else:
        draw(rows, run.out.with_suffix(".png"))
    return int(any(row["status"] != OK for row in rows if row["peer"] == "shoal"))


if __name__ == "__main__":
    harness.call(main)
