from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def accuracy_metrics(mean: float) -> dict[str, float]:
    return {"local": mean, "std": 0.1, "worst10": mean - 0.2, "f1": mean - 0.05, "central": 0.5}


def round_line(round: int, mean: float, loss: float) -> dict[str, Any]:
    line = {"round": round, "cohort_size": 2, "train_loss": 0.7, "bytes_up": 1000, "bytes_down": 3000}
    if round % 2:
        return line | {"accuracy": None, "loss": None}
    return line | {
        "accuracy": accuracy_metrics(mean * round / 4),
        "loss": {"local": loss * 4 / round, "central": None},
    }


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a small run of four rounds, of which `done` were run and the even ones evaluated.

    Each round sends 1000 bytes up and 3000 down; local accuracy and loss end at `mean` and `loss`.
    """

    def write(
        name: str = "run",
        method: str = "fedavg",
        seed: int = 0,
        mean: float = 0.75,
        loss: float = 0.5,
        done: int = 4,
        clients: tuple[str, ...] = ("a", "b", "c"),
        config: dict[str, Any] | None = None,
    ) -> Path:
        run = tmp_path / name
        run.mkdir()
        job = {"method": method, "data": "digits", "partition": "dirichlet", "clients": len(clients)}
        job |= {"rounds": 4, "cohort": 2, "lr": 0.1, "seed": seed, "set": {}}
        objects: dict[str, Any] = {
            "config": job | (config or {}),
            "about": {"format": 3, "shoal": "0.1.0", "python": "3.11"},
            "partition": {
                "clients": clients,
                "classes": ["x", "y"],
                "counts": [[i, 2 * i] for i, _ in enumerate(clients)],
                "heterogeneity": {"js_distance": 0.25, "num_samples": 9},
                "note": "",
            },
        }
        if done == 4:
            objects["result"] = {
                "method": method,
                "seed": seed,
                "rounds": 4,
                "accuracy": accuracy_metrics(mean),
                "loss": {"local": loss, "central": None},
                "bytes_up": 4000,
                "bytes_down": 12000,
                "wall_s": 90.0,
            }
        rounds = range(1, done + 1)
        accuracies = [*(0.5 for _ in clients[1:]), None]  # the last client did not respond
        lines: dict[str, list[dict[str, Any]]] = {
            "rounds": [round_line(r, mean, loss) for r in rounds],
            "clients": [
                {"round": r, "accuracy": accuracies, "num_samples": [10 for _ in clients]} for r in rounds if r % 2 == 0
            ],
            "timing": [{"round": r, "wall_s": 1.5} for r in rounds],
        }
        for file, value in objects.items():
            (run / f"{file}.json").write_text(json.dumps(value))
        for file, values in lines.items():
            (run / f"{file}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
        return run

    return write


@pytest.fixture
def write_course(write_run: Callable[..., Path]) -> Callable[..., Path]:
    """Write a run with these accuracies, round by round (None: not evaluated), where each round takes 10 J.

    Clients spend 1 J on preparation, 6 J on training and 1 J on communication. The server works 0.5 s at 4 W, which
    counts as preparation: 3 J of preparation in all. A simulated round takes 2 s.
    """

    def write(
        name: str,
        accuracy: Sequence[float | None],
        method: str = "fedavg",
        seed: int = 0,
        kind: str = "central",
        finished: bool = True,
        stopped: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> Path:
        run = write_run(name, method, seed, done=0, config={"rounds": len(accuracy)} | (config or {}))
        n = len(accuracy)
        lines = [
            {
                **round_line(r, 0.0, 1.0),
                "joules": {"preparation": 1.0, "training": 6.0, "communication": 1.0},
                "sim_time_s": 2.0,
                "accuracy": None if a is None else accuracy_metrics(0.3) | {"central": None} | {kind: a},
            }
            for r, a in enumerate(accuracy, start=1)
        ]
        files = {"rounds": lines, "timing": [{"round": r + 1, "wall_s": 1.5, "server_s": 0.5} for r in range(n)]}
        for file, values in files.items():
            (run / f"{file}.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
        result = {
            "rounds": n,
            "accuracy": lines[-1]["accuracy"],
            "joules": {"preparation": 3.0 * n, "training": 6.0 * n, "communication": 1.0 * n, "total": 10.0 * n},
            "server_joules": {"total": 2.0 * n, "seconds": 0.5 * n, "watts": 4.0, "kind": "measured"},
            "wall_s": 90.0,
            "stop_reason": stopped,
        }
        if finished:
            (run / "result.json").write_text(json.dumps(result))
        return run

    return write
