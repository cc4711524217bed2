"""The tool that compares the bytes of two checkouts sees a difference where there is one."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from same_bytes import compare_runs


def written(run: Path, value: float, rounds: str = "{}") -> Path:
    checkpoint = run / "checkpoints/round-000002"
    checkpoint.mkdir(parents=True)
    save_file({"models/w": np.array([1.0, value], dtype=np.float32)}, checkpoint / "state.safetensors")
    (run / "result.json").write_text("{}")
    (run / "rounds.jsonl").write_text(rounds + "\n")
    return run


def test_equal_runs_are_the_same(tmp_path):
    found = compare_runs(written(tmp_path / "old", 2.0), written(tmp_path / "new", 2.0))
    assert found == {"same": True, "tensors": 1, "differing": 0, "gap": 0.0, "same_records": True}


def test_another_number_and_another_record_are_seen(tmp_path):
    found = compare_runs(written(tmp_path / "old", 2.0), written(tmp_path / "new", 2.5, '{"round": 1}'))
    assert found == {"same": False, "tensors": 1, "differing": 1, "gap": 0.5, "same_records": False}


def test_a_run_that_failed_is_not_the_same(tmp_path):
    assert compare_runs(written(tmp_path / "old", 2.0), tmp_path / "new")["why"] == "did not run in the new tree"
