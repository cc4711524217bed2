"""shoal beside Flower's simulation, Apple's pfl and a bare PyTorch loop, on the same work: `make bench`.

Everyone runs in a process of its own, one after the other, in several turns, so that a busy machine disturbs them
alike; what is compared are ratios of medians. That the work is the same is checked: after two rounds all must have
the same weights. The result is a table, `results/peers.json` and `results/peers.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import work
from torch.utils.flop_counter import FlopCounterMode
from work import WORKS, Work

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPTS = {
    "shoal": [sys.executable, str(HERE / "peers/with_shoal.py")],
    "bare": [sys.executable, str(HERE / "peers/with_torch.py")],
    "pfl": [sys.executable, str(HERE / "peers/with_pfl.py")],
    "pfl-processes": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(os.cpu_count()), "--standalone"),
        str(HERE / "peers/with_pfl.py"),
    ],
    "flower": [sys.executable, str(HERE / "peers/with_flower.py")],
    "flower-tuned": [sys.executable, str(HERE / "peers/with_flower.py")],
}
MORE = {"flower-tuned": ["1"]}
NAMES = {
    "shoal": "shoal",
    "bare": "PyTorch loop",
    "pfl": "pfl, 1 process",
    "pfl-processes": f"pfl, {os.cpu_count()} processes",
    "flower": "Flower simulation",
    "flower-tuned": "Flower, 1 CPU/client",
}
WARM = 2  # rounds that are not counted: imports, first allocations, recording
ALIKE = 1e-4  # weights after two rounds; later, sums in other orders drift apart as they do in any training


def timed(who: str, folder: Path, rounds: int) -> dict[str, Any]:
    around = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONPATH": str(HERE)}
    began = time.time()
    command = [*SCRIPTS[who], str(folder), str(rounds), *MORE.get(who, [])]
    done = subprocess.run(command, env=os.environ | around, capture_output=True, text=True, check=False)
    whole = time.time() - began
    if done.returncode:
        raise SystemExit(f"{NAMES[who]} failed:\n{done.stderr[-3000:]}")
    ends = json.loads((folder / f"{who}.json").read_text())["round_ends"]
    return {
        "whole": whole,
        "until_first_round": ends[0] - began,
        "rounds": [b - a for a, b in zip(ends[WARM - 1 :], ends[WARM:], strict=False)],
    }


def gap(folder: Path, who: str) -> float:
    """The largest difference from shoal's weights."""
    ours, theirs = np.load(folder / "shoal.npz"), np.load(folder / f"{who}.npz")
    return max(float(np.abs(ours[k] - theirs[k]).max()) for k in ours.files)


def measured(spec: Work, who: list[str], rounds: int, turns: int) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {w: {"rounds": [], "whole": [], "until_first_round": []} for w in who}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        work.prepare(spec, folder, rounds)
        for w in who:
            timed(w, folder, WARM)
            found[w]["gap"] = gap(folder, w)
            if found[w]["gap"] > ALIKE:
                raise SystemExit(f"{NAMES[w]} did not do the same work: its weights differ by {found[w]['gap']:.2g}")
        for turn in range(turns):
            for w in who:
                print(f"{spec.name}: {NAMES[w]}, {rounds} rounds, turn {turn + 1} of {turns}", file=sys.stderr)
                for key, value in timed(w, folder, rounds).items():
                    found[w][key] += value if isinstance(value, list) else [value]
    return {
        w: {
            "per_round_s": statistics.median(f["rounds"]),
            "per_round_range_s": [min(f["rounds"]), max(f["rounds"])],
            "until_first_round_s": statistics.median(f["until_first_round"]),
            "whole_s": statistics.median(f["whole"]),
            "weights_differ_by": f["gap"],
        }
        for w, f in found.items()
    }


def multiply_rate(size: int = 1024) -> float:
    """Floating-point operations per second of large matrix products on all cores, as it goes on average."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(200):
        begun = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / statistics.median(seconds)


def operations(spec: Work) -> int:
    """Floating-point operations of one round, counted as they run."""
    net = work.network(spec)
    x, y = torch.randn(work.BATCH, *spec.shape), torch.zeros(work.BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(net(x), y).backward()
    return counter.get_total_flops() * work.CLIENTS * spec.epochs * (work.ROWS // work.BATCH)


def with_ratios(spec: Work, times: dict[str, Any], rate: float) -> dict[str, Any]:
    for row in times.values():
        row["times_shoal"] = row["per_round_s"] / times["shoal"]["per_round_s"]
        row["whole_times_shoal"] = row["whole_s"] / times["shoal"]["whole_s"]
        row["share_of_multiply_rate"] = operations(spec) / row["per_round_s"] / rate
    return times


def table(name: str, times: dict[str, Any], rounds: int) -> str:
    head = (
        f"{name:20} {'s/round':>8} {'/shoal':>7} {f'{rounds} rounds':>10} {'/shoal':>7} {'of GEMM':>8} {'weights':>9}"
    )
    lines = [
        f"{NAMES[w]:20} {t['per_round_s']:8.3f} {t['times_shoal']:6.1f}x {t['whole_s']:9.1f}s "
        f"{t['whole_times_shoal']:6.1f}x {t['share_of_multiply_rate']:8.2f} {t['weights_differ_by']:9.1e}"
        for w, t in times.items()
    ]
    return "\n".join([head, *lines, ""])


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panes = plt.subplots(1, len(results), figsize=(5 * len(results), 3), layout="constrained", squeeze=False)
    for pane, (name, times) in zip(panes[0], results.items(), strict=True):
        who = list(times)[::-1]
        bars = pane.barh(
            [NAMES[w] for w in who],
            [times[w]["per_round_s"] for w in who],
            color=["#0072b2" if w == "shoal" else "#b0b0b0" for w in who],
        )
        pane.bar_label(bars, [f" {times[w]['per_round_s']:.2f} s ({times[w]['times_shoal']:.1f}x)" for w in who])
        pane.set_title(f"{name}: seconds per round, warm", loc="left", fontsize=10)
        pane.margins(x=0.35)
        pane.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--who", nargs="+", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=20, help="of the MLP; the CNN takes a third")
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    who = ["shoal", *(w for w in given.who if w != "shoal")]
    rate, results = multiply_rate(), {}
    for name in given.works:
        rounds = given.rounds if name == "mlp" else max(WARM + 2, given.rounds // 3)
        times = results[name] = with_ratios(WORKS[name], measured(WORKS[name], who, rounds, given.turns), rate)
        print(table(name, times, rounds), flush=True)
    RESULTS.mkdir(exist_ok=True)
    facts = {"cores": os.cpu_count(), "multiply_rate_gflops": rate / 1e9, "torch": torch.__version__, "works": results}
    (RESULTS / "peers.json").write_text(json.dumps(facts, indent=1) + "\n")
    draw(results, RESULTS / "peers.png")
    print(f"written: {RESULTS / 'peers.json'} and peers.png")


if __name__ == "__main__":
    main()
