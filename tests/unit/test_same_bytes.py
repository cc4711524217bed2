"""The tool that compares the bytes of two checkouts finds differences, and none between old and new names."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from same_bytes import CASES, compare_runs, has_old_names, read_rounds, to_old_arguments

from shoal.store import FORMAT

OLD_ROUND = {
    "round": 1,
    "cohort": 3,
    "train_loss": 0.5,
    "metrics": {"train.loss": 0.5, "cluster.groups": 2.0, "probe.moved": 1.0},
    "joules": {"pre": 1.0, "train": 2.0, "comm": 3.0, "long": 4.0},
    "late": 1,
    "late_clients": ["c1"],
    "left": ["c2"],
    "bytes_long": 7,
    "accuracy": {"mean": 0.5, "std": 0.1, "central": None},
    "loss": {"mean": 1.5, "central": None},
}
NEW_ROUND = {
    "round": 1,
    "cohort_size": 3,
    "train_loss": 0.5,
    "metrics": {"train.loss": 0.5, "cluster.num_clusters": 2.0, "probe.num_reassigned": 1.0},
    "joules": {"preparation": 1.0, "training": 2.0, "communication": 3.0, "cloud_link": 4.0},
    "num_late_reports": 1,
    "late_clients": ["c1"],
    "depleted_clients": ["c2"],
    "bytes_edge_cloud": 7,
    "accuracy": {"local": 0.5, "std": 0.1, "central": None},
    "loss": {"local": 1.5, "central": None},
}


def write_run(run: Path, value: float, rounds: str = "{}") -> Path:
    checkpoint = run / "checkpoints/round-000002"
    checkpoint.mkdir(parents=True)
    save_file({"models/w": np.array([1.0, value], dtype=np.float32)}, checkpoint / "state.safetensors")
    (run / "result.json").write_text("{}")
    (run / "rounds.jsonl").write_text(rounds + "\n")
    return run


def write_checkout(folder: Path, run_format: int) -> Path:
    (folder / "src/shoal/store").mkdir(parents=True)
    (folder / "src/shoal/store/__init__.py").write_text(f'"""Run directories."""\n\nFORMAT = {run_format}  # of them\n')
    return folder


def test_equal_runs_are_the_same(tmp_path):
    comparison = compare_runs(write_run(tmp_path / "old", 2.0), write_run(tmp_path / "new", 2.0))
    assert comparison == {"same": True, "tensors": 1, "differing": 0, "gap": 0.0, "same_rounds": True}


def test_another_number_and_another_round_are_seen(tmp_path):
    comparison = compare_runs(write_run(tmp_path / "old", 2.0), write_run(tmp_path / "new", 2.5, '{"round": 1}'))
    assert comparison == {"same": False, "tensors": 1, "differing": 1, "gap": 0.5, "same_rounds": False}


def test_another_round_alone_is_a_difference(tmp_path):
    comparison = compare_runs(write_run(tmp_path / "old", 2.0), write_run(tmp_path / "new", 2.0, '{"round": 1}'))
    assert comparison["same"] is False


def test_a_run_that_failed_is_not_the_same(tmp_path):
    assert compare_runs(write_run(tmp_path / "old", 2.0), tmp_path / "new")["reason"] == "did not run in the new tree"


def test_rounds_with_old_keys_equal_those_with_new_keys(tmp_path):
    old = write_run(tmp_path / "old", 2.0, json.dumps(OLD_ROUND))
    new = write_run(tmp_path / "new", 2.0, json.dumps(NEW_ROUND))
    assert read_rounds(old) == [NEW_ROUND]
    assert compare_runs(old, new)["same"] is True


def test_rounds_that_were_not_evaluated_are_translated_too(tmp_path):
    without_evaluation = {"accuracy": None, "loss": None}
    old = write_run(tmp_path / "old", 2.0, json.dumps(OLD_ROUND | without_evaluation))
    assert read_rounds(old) == [NEW_ROUND | without_evaluation]


@pytest.mark.parametrize(("run_format", "is_old"), [(2, True), (FORMAT, False)])
def test_the_format_of_a_checkout_tells_which_names_it_has(tmp_path, run_format, is_old):
    assert has_old_names(write_checkout(tmp_path, run_format)) is is_old


@pytest.mark.parametrize(
    ("case", "old_arguments"),
    [
        ("edges", "--edges 2 --cloud-every 2"),
        ("edges-by-labels", "--edges alike:2"),
        ("probe", "--set probe.at=1 --set probe.every=2"),
        ("noise", "--set represent.gamma=0.5"),
        ("pieces-6", "--set private.start=cold"),
    ],
)
def test_cases_have_old_names_for_an_old_checkout(case, old_arguments):
    assert to_old_arguments(CASES[case]).endswith(old_arguments)


def test_cases_without_renamed_options_stay_as_they_are():
    assert to_old_arguments(CASES["unseen"]) == CASES["unseen"]
