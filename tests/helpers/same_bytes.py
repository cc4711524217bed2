"""Do two source trees give the same bytes? Every method is run in both, one after the other, and checkpoints compared.

    python tests/helpers/same_bytes.py OLD NEW [--only METHOD ...] [--out FILE]

OLD and NEW are checkouts of the project. Compared are the tensors of the last checkpoint, the clients' private state
and the recorded rounds, which hold every counted byte and joule. Keys of secure aggregation are left out: clients draw
them from their own entropy. The exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

SMALL = "--data digits --clients 8 --cohort 3 --rounds 4 --epochs 1 --eval-every 2 --seed 3 --devices pi:0.5,phone:0.5"
PLAIN = f"{SMALL} --fleet plain"
CASES = {  # beside every method by itself
    "edges": f"fedavg {PLAIN} --edges 2 --cloud-every 2",
    "edges-scmoe": f"scmoe {PLAIN} --edges 2 --cloud-every 2",
    "edges-by-labels": f"shoal {PLAIN} --edges alike:2",
    "unseen": f"fce {PLAIN} --unseen 2 --set serve.rule=density",
    "stacked": f"fedavg {SMALL} --fleet vector",
    "pool": f"shoal {SMALL} --fleet pool --workers 2",
    "images": f"fedprox {PLAIN} --data images.npz --model cnn-fedavg --rounds 2",
    "probe": f"shoal {PLAIN} --rounds 6 --partition iid+invert:0.5 --set probe.at=1 --set probe.every=2",
    "noise": f"repclust {PLAIN} --set represent.gamma=0.5",
    "secure": f"aggregate=secure {PLAIN}",
    "pieces-1": f"represent=sparsity,cluster=aidc,select=turns,personalise=gate {PLAIN}",
    "pieces-2": f"represent=labels,cluster=dbscan,select=bandit,personalise=fine-tune {PLAIN}",
    "pieces-3": f"represent=labels,cluster=similar,select=one-of-each,aggregate=momentum,serve=average+prior {PLAIN}",
    "pieces-4": f"represent=sparsity,cluster=aidc,aggregate=cosine,serve=confidence {PLAIN}",
    "pieces-5": f"select=contribution,aggregate=contribution,personalise=update,train=proximal {PLAIN}",
    "pieces-6": f"represent=updates,cluster=mctc,select=simclust,personalise=gate {PLAIN} --set private.start=cold",
    "pieces-7": f"select=balanced,train=adjusted,serve=prior {PLAIN} --unseen 2",
}
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
    """Scikit-learn's digits at the size that the networks with convolutions need."""
    digits = load_digits()
    images = np.kron(digits.images, np.ones((2, 2)))[:, None].astype(np.float32) / 16
    np.savez(folder / "images.npz", x=images[:600], y=digits.target[:600])


def run_all(checkout: Path, folder: Path, only: list[str]) -> None:
    write_images(folder)
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "COLUMNS": "200"}
    arguments = [json.dumps(CASES), str(folder), json.dumps(only), PLAIN]
    subprocess.run([sys.executable, "-c", RUNNER, *arguments], env=environment, check=True, cwd=folder)


def read_tensors(run: Path) -> dict[str, object]:
    """Everything that follows from the seed: the last checkpoint and private state, by file and name."""
    if not (run / "result.json").exists():
        return {}
    found: dict[str, object] = {}
    last = sorted(run.glob("checkpoints/round-*"))[-1]
    for file in [last / "state.safetensors", *sorted(run.glob("private/**/*.safetensors"))]:
        for name, value in load_file(file).items():
            if "key" not in name:
                found[f"{file.parent.name}/{file.name}: {name}"] = value
    return found


def read_rounds(run: Path) -> list[dict[str, object]]:
    file = run / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def compare_runs(old: Path, new: Path) -> dict[str, object]:
    a, b = read_tensors(old), read_tensors(new)
    if not a or not b:
        return {"same": False, "why": f"did not run in {'the old' if not a else 'the new'} tree"}
    if a.keys() != b.keys():
        return {"same": False, "why": f"other tensors: {sorted(a.keys() ^ b.keys())[:4]}"}
    differing = [k for k in a if a[k].tobytes() != b[k].tobytes()]
    gap = max((float(abs(a[k].astype("f8") - b[k].astype("f8")).max()) for k in differing), default=0.0)
    records = read_rounds(old) == read_rounds(new)
    return {"same": not differing, "tensors": len(a), "differing": len(differing), "gap": gap, "same_records": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = []
        for name, checkout in (("old", asked.old), ("new", asked.new)):
            folders.append(Path(place) / name)
            folders[-1].mkdir()
            run_all(checkout.resolve(), folders[-1], asked.only)
        names = sorted({run.name for folder in folders for run in folder.iterdir() if run.is_dir()})
        found = {name: compare_runs(*(folder / name for folder in folders)) for name in names}
    for name, facts in found.items():
        print(name, json.dumps(facts))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if all(facts["same"] for facts in found.values()) else 1)


if __name__ == "__main__":
    main()
