from __future__ import annotations

import pytest

from shoal.errors import UserError
from shoal.store.failure import record_failure
from shoal.store.reader import differing_settings, find_run_folders, read_run, require_rounds, run_labels, runs_by_job


def test_a_finished_run_is_read_completely(write_run):
    run = read_run(write_run())
    assert run.label == "fedavg"
    assert run.is_finished and run.status == "finished"
    assert [line["round"] for line in run.rounds] == [1, 2, 3, 4]
    assert [line["round"] for line in run.evaluated_rounds] == [2, 4]


def test_the_status_of_an_unfinished_run_names_its_last_round(write_run):
    run = read_run(write_run(done=3))
    assert not run.is_finished
    assert run.status == "unfinished (round 3 of 4)"


def test_the_status_of_a_run_that_stopped_early_names_reason_and_round(write_course):
    run = read_run(write_course("run", [0.1, 0.2, 0.3], stopped="the budget of 30 J is spent"))
    assert run.is_finished
    assert run.status == "finished (the budget of 30 J is spent at round 3)"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere is not a run directory: there is no such folder"):
        read_run(tmp_path / "nowhere")


def test_missing_files_are_named(write_run):
    path = write_run()
    (path / "config.json").unlink()
    (path / "partition.json").unlink()
    with pytest.raises(UserError, match=r"run is not a run directory: it lacks config.json and partition.json"):
        read_run(path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"method": "fe', "config.json is not readable as JSON"),
        ("config.json", "[1]", "config.json contains a list, but it must contain a JSON object"),
        ("config.json", '{"rounds": 3, "seed": 0}', "config.json has no field 'method'"),
        ("about.json", '{"format": 2}', "was written in format 2, but this version of shoal reads format 3 only"),
        ("about.json", "{}", "was written in format None, but this version of shoal reads format 3 only"),
        ("rounds.jsonl", "7\n", "rounds.jsonl is damaged: line 1 is not a JSON object"),
    ],
)
def test_damage_is_named(write_run, file, text, message):
    path = write_run()
    (path / file).write_text(text)
    with pytest.raises(UserError, match=message):
        read_run(path)


@pytest.mark.parametrize("cut", [b'{"round": 5, "coh', b'{"round": 5, "note": "\xc3'])
def test_a_cut_last_line_is_ignored(write_run, cut):
    path = write_run()
    with (path / "rounds.jsonl").open("ab") as file:
        file.write(cut)
    assert [line["round"] for line in read_run(path).rounds] == [1, 2, 3, 4]


def test_a_cut_line_before_the_last_is_an_error(write_run):
    path = write_run()
    lines = (path / "rounds.jsonl").read_text().splitlines()
    lines[1] = lines[1][:20]
    (path / "rounds.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"rounds.jsonl is damaged: line 2"):
        read_run(path)


def test_a_run_without_rounds_is_an_error_only_where_rounds_are_needed(write_run):
    path = write_run(done=0)
    (path / "rounds.jsonl").unlink()
    assert read_run(path).status == "unfinished (round 0 of 4)"
    with pytest.raises(UserError, match="has no rounds yet"):
        require_rounds(read_run(path))


def test_a_failed_run_has_its_reason_as_status_until_it_is_finished(write_run):
    path, job = write_run(done=3), {"method": "fedavg", "seed": 0, "rounds": 4}
    record_failure(path, job, "training diverged")
    run = read_run(path)
    assert (run.failure, run.status, run.is_finished) == ("training diverged", "failed: training diverged", False)
    (path / "result.json").write_text("{}")
    assert (read_run(path).failure, read_run(path).status) == (None, "finished")


def test_a_run_that_failed_before_it_started_is_read_only_on_request(tmp_path, write_run):
    finished = [read_run(write_run(f"s{seed}", seed=seed)) for seed in (0, 1)]
    record_failure(tmp_path / "lost", {"method": "fedavg", "seed": 2, "rounds": 4, "clients": None}, "no data")
    with pytest.raises(UserError, match=r"it lacks config.json and about.json"):
        read_run(tmp_path / "lost")
    run = read_run(tmp_path / "lost", allow_not_started=True)
    assert (run.failure, run.rounds, run.config["seed"]) == ("no data", (), 2)
    assert [path.name for path in find_run_folders(tmp_path)] == ["lost", "s0", "s1"]
    assert run_labels([*finished, run]) == ["fedavg seed=0", "fedavg seed=1", "fedavg seed=2"]
    assert [len(job_runs) for _, job_runs in runs_by_job([*finished, run])] == [2]


def test_labels_name_what_differs_within_a_method(write_run):
    runs = [
        read_run(write_run("a", seed=0)),
        read_run(write_run("b", seed=1)),
        read_run(write_run("c", method="fedprox", config={"set": {"train": {"mu": 0.1}}, "keep_checkpoints": 5})),
    ]
    assert run_labels(runs) == ["fedavg seed=0", "fedavg seed=1", "fedprox"]
    assert differing_settings(runs) == ["method", "seed", "train.mu"]


def test_a_label_does_not_name_what_a_run_does_not_have(write_run):
    runs = [
        read_run(write_run("a", config={"battery_joules": None})),
        read_run(write_run("b", config={"battery_joules": 5.0})),
    ]
    assert run_labels(runs) == ["fedavg", "fedavg battery_joules=5.0"]


def test_labels_of_equal_jobs_name_the_folder(write_run):
    runs = [read_run(write_run("first")), read_run(write_run("second"))]
    assert run_labels(runs) == ["fedavg · first", "fedavg · second"]


def test_runs_that_differ_only_in_the_seed_are_one_job(write_run):
    runs = [
        read_run(write_run("a", seed=0)),
        read_run(write_run("b", seed=1)),
        read_run(write_run("c", seed=1)),  # the same seed again
        read_run(write_run("d", seed=2, done=3)),  # unfinished beside finished ones
        read_run(write_run("e", seed=0, config={"lr": 0.5}, done=3)),  # unfinished, but all there is
    ]
    jobs = [(label, [run.path.name for run in job_runs]) for label, job_runs in runs_by_job(runs)]
    assert jobs == [("fedavg lr=0.1", ["a", "b"]), ("fedavg lr=0.5", ["e"])]
