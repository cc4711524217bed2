"""Compares the runs of two source trees byte by byte: every method runs in both trees, one after the other.

    python tests/helpers/same_bytes.py OLD NEW [--only METHOD ...] [--out FILE]

OLD and NEW are checkouts of the project. The tensors of the last checkpoint, the clients' private state and the
recorded rounds, which contain all counted bytes and joules, are compared. Keys of secure aggregation are left out,
because clients draw them from their own entropy. The exit code is 1 if anything differs.

Cases use the names of run directories of format 3. A checkout with an earlier format gets the names that it knows, and
the keys of its recorded rounds are translated before the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

SMALL = "--data digits --clients 8 --cohort 3 --rounds 4 --epochs 1 --eval-every 2 --seed 3 --devices pi:0.5,phone:0.5"
PLAIN = f"{SMALL} --fleet plain"
CASES = {  # in addition to every method with the options of PLAIN
    "edges": f"fedavg {PLAIN} --edges 2 --cloud-every-rounds 2",
    "edges-scmoe": f"scmoe {PLAIN} --edges 2 --cloud-every-rounds 2",
    "edges-by-labels": f"shoal {PLAIN} --edges similar:2",
    "unseen": f"fce {PLAIN} --unseen 2 --set serve.rule=density",
    "stacked": f"fedavg {SMALL} --fleet vector",
    "pool": f"shoal {SMALL} --fleet pool --workers 2",
    "images": f"fedprox {PLAIN} --data images.npz --model cnn-fedavg --rounds 2",
    "probe": f"shoal {PLAIN} --rounds 6 --partition iid+invert:0.5 "
    "--set probe.first_round=1 --set probe.every_rounds=2",
    "noise": f"repclust {PLAIN} --set represent.noise_scale=0.5",
    "secure": f"aggregate=secure {PLAIN}",
    "pieces-1": f"represent=sparsity,cluster=aidc,select=turns,personalise=gate {PLAIN}",
    "pieces-2": f"represent=labels,cluster=dbscan,select=bandit,personalise=fine-tune {PLAIN}",
    "pieces-3": f"represent=labels,cluster=similar,select=one-of-each,aggregate=momentum,serve=average+prior {PLAIN}",
    "pieces-4": f"represent=sparsity,cluster=aidc,aggregate=cosine,serve=confidence {PLAIN}",
    "pieces-5": f"select=contribution,aggregate=contribution,personalise=update,train=proximal {PLAIN}",
    "pieces-6": f"represent=updates,cluster=mctc,select=simclust,personalise=gate {PLAIN} --set personal.start=cold",
    "pieces-7": f"select=balanced,train=adjusted,serve=prior {PLAIN} --unseen 2",
}
FORMAT_OF_NAMES = 3  # the first format of run directories whose checkouts have the names of CASES
OLD_PREFIXES = {  # beginning of an argument -> what it was before that format
    "--cloud-every-rounds": "--cloud-every",
    "similar:": "alike:",
    "probe.first_round=": "probe.at=",
    "probe.every_rounds=": "probe.every=",
    "represent.noise_scale=": "represent.gamma=",
    "personal.start=": "private.start=",
}
NEW_ROUND_KEYS = {  # key of a line of rounds.jsonl before that format -> its key now
    "cohort": "cohort_size",
    "late": "num_late_reports",
    "left": "depleted_clients",
    "bytes_long": "bytes_edge_cloud",
}
NEW_JOULE_KEYS = {
    "pre": "preparation",
    "train": "training",
    "comm": "communication",
    "long": "cloud_link",
}
NEW_METRIC_SUFFIXES = {"groups": "num_clusters", "moved": "num_reassigned"}
RUNNER = """
import json, sys
from typer.testing import CliRunner
from shoal.cli import app
from shoal.methods import METHODS
cases, folder, only = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
cases = {**{m: m + " " + sys.argv[4] for m in METHODS}, **cases}
for name, text in cases.items():
    if only and name not in only:
        continue
    result = CliRunner().invoke(app, ["run", *text.split(), "--out", f"{folder}/{name}"])
    print(name, "failed: " + result.output.strip()[-300:] if result.exit_code else "ran", flush=True)
"""


def write_images(folder: Path) -> None:
    """Writes scikit-learn's digits at the size that networks with convolutions need."""
    digits = load_digits()
    images = np.kron(digits.images, np.ones((2, 2)))[:, None].astype(np.float32) / 16
    np.savez(folder / "images.npz", x=images[:600], y=digits.target[:600])


def has_old_names(checkout: Path) -> bool:
    """Returns whether the checkout has the names from before FORMAT_OF_NAMES."""
    text = (checkout / "src/shoal/store/__init__.py").read_text()
    match = re.search(r"^FORMAT = (\d+)", text, re.MULTILINE)
    return match is None or int(match[1]) < FORMAT_OF_NAMES


def to_old_arguments(arguments: str) -> str:
    """Returns the arguments of a case with the names from before FORMAT_OF_NAMES."""
    return " ".join(_to_old_argument(argument) for argument in arguments.split())


def _to_old_argument(argument: str) -> str:
    for new, old in OLD_PREFIXES.items():
        if argument.startswith(new):
            return old + argument.removeprefix(new)
    return argument


def run_all(checkout: Path, folder: Path, only: list[str]) -> None:
    """Runs every case with the code of the checkout. Each case gets a run directory in the folder."""
    write_images(folder)
    cases = {name: to_old_arguments(text) for name, text in CASES.items()} if has_old_names(checkout) else CASES
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "COLUMNS": "200"}
    arguments = [json.dumps(cases), str(folder), json.dumps(only), PLAIN]
    subprocess.run([sys.executable, "-c", RUNNER, *arguments], env=environment, check=True, cwd=folder)


def read_tensors(run: Path) -> dict[str, np.ndarray]:
    """Returns all tensors of the last checkpoint and the private state, by file and name."""
    if not (run / "result.json").exists():
        return {}
    tensors: dict[str, np.ndarray] = {}
    last = sorted(run.glob("checkpoints/round-*"))[-1]
    for file in [last / "state.safetensors", *sorted(run.glob("private/**/*.safetensors"))]:
        for name, value in load_file(file).items():
            if "key" not in name:
                tensors[f"{file.parent.name}/{file.name}: {name}"] = value
    return tensors


def read_rounds(run: Path) -> list[dict[str, Any]]:
    """Returns the recorded rounds, with the keys of the present format."""
    file = run / "rounds.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [with_new_keys(line) if "cohort" in line else line for line in lines]


def with_new_keys(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of rounds.jsonl from before FORMAT_OF_NAMES with the present keys."""
    new = {NEW_ROUND_KEYS.get(key, key): value for key, value in line.items()}
    new["joules"] = {NEW_JOULE_KEYS.get(key, key): value for key, value in line["joules"].items()}
    new["metrics"] = {_new_metric(name): value for name, value in line["metrics"].items()}
    for key in ("accuracy", "loss"):
        if line[key] is not None:
            new[key] = {"local" if k == "mean" else k: value for k, value in line[key].items()}
    return new


def _new_metric(name: str) -> str:
    stage, dot, metric = name.rpartition(".")
    return f"{stage}{dot}{NEW_METRIC_SUFFIXES.get(metric, metric)}"


def compare_runs(old: Path, new: Path) -> dict[str, object]:
    """Returns whether two runs have the same tensors and rounds, and how much they differ."""
    a, b = read_tensors(old), read_tensors(new)
    if not a or not b:
        return {"same": False, "reason": f"did not run in {'the old' if not a else 'the new'} tree"}
    if a.keys() != b.keys():
        return {"same": False, "reason": f"other tensors: {sorted(a.keys() ^ b.keys())[:4]}"}
    differing = [k for k in a if a[k].tobytes() != b[k].tobytes()]
    gap = max((float(abs(a[k].astype("f8") - b[k].astype("f8")).max()) for k in differing), default=0.0)
    same_rounds = read_rounds(old) == read_rounds(new)
    return {
        "same": not differing and same_rounds,
        "tensors": len(a),
        "differing": len(differing),
        "gap": gap,
        "same_rounds": same_rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = []
        for name, checkout in (("old", arguments.old), ("new", arguments.new)):
            folders.append(Path(temporary) / name)
            folders[-1].mkdir()
            run_all(checkout.resolve(), folders[-1], arguments.only)
        names = sorted({run.name for folder in folders for run in folder.iterdir() if run.is_dir()})
        comparisons = {name: compare_runs(*(folder / name for folder in folders)) for name in names}
    for name, comparison in comparisons.items():
        print(name, json.dumps(comparison))
    if arguments.out:
        arguments.out.write_text(json.dumps(comparisons, indent=1) + "\n")
    sys.exit(0 if all(comparison["same"] for comparison in comparisons.values()) else 1)


if __name__ == "__main__":
    main()
