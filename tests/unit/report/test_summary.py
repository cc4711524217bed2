from __future__ import annotations

import json
from math import sqrt

import pytest

from shoal.report.summary import (
    COLUMNS,
    best_rows,
    comparability_warning,
    duration_text,
    joules_text,
    joules_unit,
    run_remarks,
    shown_columns,
    summarise,
    summarise_seeds,
)
from shoal.store.reader import read_run

COLUMN = {".".join(c.path): c for c in COLUMNS}


def test_the_row_of_a_finished_run_is_from_its_result(write_run):
    path = write_run(mean=0.75, loss=0.5)
    assert summarise([read_run(path)]) == [
        {
            "run_dir": str(path),
            "label": "fedavg",
            "method": "fedavg",
            "seed": 0,
            "finished": True,
            "status": "finished",
            "failure": None,
            "completed_rounds": 4,
            "accuracy": {"local": 0.75, "std": 0.1, "worst10": 0.55, "f1": 0.7, "central": 0.5},
            "loss": {"local": 0.5, "central": None},
            "num_clusters": None,
            "bytes_up": 4000,
            "bytes_down": 12000,
            "num_edges": 0,
            "bytes_edge_cloud": 16000,
            "joules": {"training": None, "preparation": None, "communication": None, "server": None, "total": None},
            "sim_time_s": None,
            "predict_ms": None,
            "wall_s": 90.0,
        }
    ]


def test_the_row_of_an_unfinished_run_is_from_its_rounds(write_run):
    (row,) = summarise([read_run(write_run(mean=0.75, loss=0.5, done=3))])
    assert row["completed_rounds"] == 3
    assert row["accuracy"]["local"] == 0.375  # round 2, the last evaluated
    assert row["loss"]["local"] == 1.0
    assert (row["bytes_up"], row["bytes_down"], row["wall_s"]) == (3000, 9000, 4.5)


def test_a_run_before_its_first_round_has_no_numbers(write_run):
    (row,) = summarise([read_run(write_run(done=0))])
    assert row["accuracy"]["local"] is None
    assert COLUMN["accuracy.local"].text(row) == "–"


def test_a_diverged_loss_is_missing_and_the_rows_stay_valid_json(write_run):
    rows = summarise([read_run(write_run(loss=float("nan")))])
    assert rows[0]["loss"]["local"] is None
    json.dumps(rows, allow_nan=False)


def test_seeds_of_one_job_are_averaged(write_run):
    runs = [
        read_run(write_run("a", seed=0, mean=0.70)),
        read_run(write_run("b", seed=1, mean=0.80)),
        read_run(write_run("c", seed=2, mean=0.75, done=3)),  # unfinished: left out
        read_run(write_run("d", seed=1, mean=0.99)),  # the same seed again: left out
        read_run(write_run("e", seed=3, mean=0.10, config={"lr": 0.5})),  # another job
    ]
    (row,) = summarise_seeds(runs)
    assert row["seeds"] == [0, 1]
    assert row["accuracy"]["local"] == pytest.approx({"mean": 0.75, "std": 0.1 / sqrt(2)})
    assert row["loss"]["central"] is None
    assert COLUMN["accuracy.local"].text(row) == "75.0\n± 7.1"
    assert COLUMN["bytes_up"].text(row) == "4.0 kB\n± 0"


def test_rows_over_seeds_are_named_without_the_seed(write_run):
    runs = [
        read_run(write_run(f"{lr}-{s}", seed=s, config={"lr": lr})) for lr in (0.1, 0.5) for s in (int(lr > 0.1), 2)
    ]
    assert [row["label"] for row in summarise_seeds(runs)] == ["fedavg lr=0.1", "fedavg lr=0.5"]


def test_best_is_highest_accuracy_and_lowest_loss(write_run):
    rows = summarise(
        [
            read_run(write_run("a", mean=0.70, loss=0.3)),
            read_run(write_run("b", mean=0.90, loss=0.6)),
            read_run(write_run("c", mean=0.90, loss=0.9)),
        ]
    )
    assert best_rows(rows, COLUMN["accuracy.local"]) == {1, 2}
    assert best_rows(rows, COLUMN["loss.local"]) == {0}
    assert best_rows(rows, COLUMN["bytes_up"]) == set()  # all are equal


def test_wall_time_has_no_best_run(write_run):
    rows = summarise([read_run(write_run("a")), read_run(write_run("b"))])
    rows[1]["wall_s"] = 1.0
    assert best_rows(rows, COLUMN["wall_s"]) == set()


def test_remarks_name_late_and_rejected_reports_depleted_clients_and_the_reason_of_an_early_end(write_course):
    path = write_course("a", [0.1, 0.2], stopped="every battery is empty")
    lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    lines[0] |= {"num_late_reports": 1, "late_clients": ["b"], "rejected_reports": {"a": "a reason"}}
    lines[1] |= {"num_late_reports": 2, "late_clients": ["b", "c"], "depleted_clients": ["a"]}
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_remarks([read_run(path), read_run(write_course("b", [0.1], "local"))]) == [
        "fedavg: finished (every battery is empty at round 2), 3 late reports, 1 rejected report, 1 depleted client "
        "(rounds.jsonl names the clients)."
    ]


def test_total_joules_are_the_sum_of_the_rounds(write_course):
    path = write_course("run", [0.1])  # 10 J by its lines
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {"joules": {"total": 10.06}}))
    (row,) = summarise([read_run(path)])
    assert row["joules"]["total"] == 10


def test_an_unfinished_run_is_never_best(write_run):
    runs = [
        read_run(write_run("a", mean=0.6)),
        read_run(write_run("b", mean=0.7)),
        read_run(write_run("c", mean=1.6, done=2)),
    ]
    rows = summarise(runs)
    assert rows[2]["accuracy"]["local"] == 0.8
    assert best_rows(rows, COLUMN["accuracy.local"]) == {1}


def test_the_comparability_warning_names_the_settings_that_differ(write_run):
    one, other = read_run(write_run("a")), read_run(write_run("b", config={"data": "letters"}))
    assert comparability_warning([one, one]) == ""
    warning = "These runs differ in data, so their numbers are not directly comparable."
    assert comparability_warning([one, other]) == warning


def test_joules_and_simulated_time_are_of_the_whole_run(write_course):
    (row,) = summarise([read_run(write_course("run", [0.1, None, 0.3]))])  # three rounds of 10 J and 2 s
    assert row["joules"] == {"training": 18, "preparation": 3, "communication": 3, "server": 6, "total": 30}
    assert row["sim_time_s"] == 6


def test_joules_of_an_unfinished_run_are_those_of_its_rounds(write_course):
    # The server's watts are not in a result yet, so the default of 65 W applies: 8 J + 0.5 s * 65 W a round.
    (row,) = summarise([read_run(write_course("run", [0.1, 0.2], finished=False))])
    assert row["joules"] == {"training": 12, "preparation": 2, "communication": 2, "server": 65, "total": 81}


def test_columns_without_values_are_hidden(write_run, write_course):
    old, new = read_run(write_run("old")), read_run(write_course("new", [0.1]))
    assert "Joules" not in [c.title for c in shown_columns(summarise([old]))]
    assert [c.title for c in shown_columns(summarise([old, new]))][-3:] == ["Joules", "Sim time", "Time"]
    assert COLUMN["joules.total"].text(summarise([old])[0]) == "–"


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0, "0 J"),
        (3849, "3.85 kJ"),
        (38.49, "38.5 J"),
        (999.4, "999 J"),
        (999.6, "1.00 kJ"),
        (0.0344, "34.4 mJ"),
        (2.5e6, "2.50 MJ"),
        (4e-8, "0.0400 µJ"),
        (1.234e13, "12,300 GJ"),
    ],
)
def test_joules(joules, text):
    assert joules_text(joules) == text


def test_the_unit_of_an_axis_fits_its_largest_value():
    assert joules_unit(3849) == (1000, "kJ")
    assert joules_unit(999) == (1, "J")
    assert joules_unit(0) == (1, "J")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (0.0312, "31.2 ms"),
        (0.0540, "54.0 ms"),
        (0.0996, "99.6 ms"),
        (0.5168, "517 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (59.94, "59.9 s"),
        (59.97, "1m 00s"),
        (96, "1m 36s"),
        (3599.9, "1h 00m"),
        (7380, "2h 03m"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_the_edge_cloud_link_is_shown_beside_runs_without_edges(write_run):
    """Without edge servers all messages of clients cross the link to the cloud."""
    flat, with_edges = (summarise([read_run(write_run(name=name))])[0] for name in ("flat", "with edges"))
    titles = [c.title for c in shown_columns([flat, with_edges])]
    assert "Edge-cloud link" not in titles
    with_edges |= {"num_edges": 2, "bytes_edge_cloud": 700}
    assert "Edge-cloud link" in [c.title for c in shown_columns([flat, with_edges])]
    assert COLUMN["bytes_edge_cloud"].text(flat) == "16.0 kB"
