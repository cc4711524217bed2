from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt

import pytest

from shoal.errors import UserError
from shoal.report.paper_tables import ordering_table, paper_report_tables
from shoal.reproduce.paper_table import compare_with_paper, read_paper, validate_paper
from shoal.store.failure import record_failure
from shoal.store.reader import planned_run, read_run

FINAL = {
    "source": "Table II, Fashion-MNIST",
    "metric": "final",
    "columns": {"final": {"fedavg": 48.0, "fedprox": 50.0, "local": 52.0, "fedcor": 53.0}},
    "sustained_rounds": 2,
}


@pytest.fixture
def runs(write_course):
    """Final accuracies over two seeds: fedavg 40 and 42, fedprox 41 and 45, local 30 and 32 %."""
    finals = {"fedavg": (0.40, 0.42), "fedprox": (0.41, 0.45), "local": (0.30, 0.32)}
    return [
        read_run(write_course(f"{method}-{seed}", [0.1, level, level], method, seed))
        for method, levels in finals.items()
        for seed, level in enumerate(levels)
    ]


def test_ours_stands_beside_the_papers(runs):
    cell = compare_with_paper(runs, FINAL).cell("fedavg", "final")
    assert cell.paper == 48.0
    assert cell.ours.mean == pytest.approx(41)
    assert cell.ours.std == pytest.approx(sqrt(2))  # of 40 and 42, n - 1
    assert compare_with_paper(runs, FINAL).cell("fedcor", "final").ours is None


def test_every_ordering_of_the_paper_gets_a_verdict(runs):
    # Sample variances 2, 8 and 2, two seeds each. fedprox - fedavg: 43 - 41 = 2, standard error sqrt(2/2 + 8/2)
    # = sqrt(5) = 2.24: undecided. local - fedavg: -10, sqrt(2/2 + 2/2) = 1.41; local - fedprox: -12, 2.24: opposite.
    table = compare_with_paper(runs, FINAL)
    found = {(o.higher, o.lower): o for o in table.orderings}
    assert {pair: o.verdict for pair, o in found.items()} == {
        ("fedprox", "fedavg"): "undecided",
        ("local", "fedavg"): "opposite",
        ("local", "fedprox"): "opposite",
    }
    assert found["fedprox", "fedavg"].standard_error == pytest.approx(sqrt(5))
    assert found["local", "fedavg"].difference == pytest.approx(-10)
    assert found["local", "fedavg"].paper_difference == 4
    assert table.verdict == "same 0, undecided 1, opposite 2"
    assert "Left out, because there are no runs: fedcor." in table.notes


def test_the_same_order_is_the_same(runs):
    swapped = FINAL | {"columns": {"final": {"fedavg": 1.0, "fedprox": 1.0, "local": 0.5}}}
    table = compare_with_paper(runs, swapped)  # the paper's tie is no ordering
    assert table.verdict == "same 2, undecided 0, opposite 0"


def test_one_seed_decides_nothing(runs):
    table = compare_with_paper(runs[::2], FINAL)
    assert table.verdict == "same 0, undecided 3, opposite 0"
    assert table.orderings[0].standard_error is None


def test_accuracy_at_a_budget_beside_the_paper(runs):
    # A run is 30 J. 60 % are 18 J, one round; 100 % are all three, of which the last two are sustained.
    paper = FINAL | {
        "metric": "at_budget",
        "columns": {k: {"fedavg": 1.0, "local": 2.0} for k in ("60", "100", "final")},
    }
    table = compare_with_paper(runs, paper)
    ours = [table.cell("fedavg", column).ours for column in ("60", "100", "final")]
    assert ours[0] is None
    assert [o.mean for o in ours[1:]] == pytest.approx([41, 41])
    assert table.verdict_counts("60") == {"same": 0, "undecided": 1, "opposite": 0}
    assert table.verdict_counts("100") == {"same": 0, "undecided": 0, "opposite": 1}


@pytest.mark.parametrize(
    ("unit", "number"), [("rounds", 3), ("s", 6), ("J", 30), ("kJ", 0.03), ("Wh", 30 / 3600), ("%", 100)]
)
def test_what_an_accuracy_takes_in_the_papers_unit(runs, unit, number):
    paper = FINAL | {"metric": "to_accuracy", "unit": unit, "columns": {"0.4": {"fedavg": 18.41, "local": 19.0}}}
    table = compare_with_paper(runs, paper)
    assert table.cell("fedavg", "0.4").ours.mean == pytest.approx(number)
    assert table.cell("local", "0.4").ours is None
    assert table.orderings[0].verdict == "undecided"


def test_where_a_seed_has_no_number_nothing_is_decided(runs):
    # 0.42 is sustained by one seed of fedavg only; of fedprox, too.
    paper = FINAL | {"metric": "to_accuracy", "unit": "J", "columns": {"0.42": {"fedavg": 2.0, "fedprox": 1.0}}}
    table = compare_with_paper(runs, paper)
    assert table.cell("fedavg", "0.42").ours.num_values == 1
    assert table.verdict == "same 0, undecided 1, opposite 0"


def failed(path, **config):
    """A job that failed before it began."""
    record_failure(path, {"method": "fedavg", "seed": 2, "rounds": 3} | config, "training diverged")
    return read_run(path, allow_not_started=True)


def test_a_seed_that_failed_is_one_without_a_number(runs, tmp_path):
    table = compare_with_paper([*runs, failed(tmp_path / "lost", method="local")], FINAL)
    cell = table.cell("local", "final")
    assert (cell.ours.num_values, cell.ours.num_seeds, cell.num_failed_seeds) == (2, 3, 1)
    (numbers, _) = paper_report_tables(table)
    assert [row[1] for row in numbers.rows if row[0] == "local"] == ["31.00\n± 1.41\n2 of 3 seeds"]
    assert {o.verdict for o in table.orderings if "local" in (o.higher, o.lower)} == {"undecided"}


def test_a_cell_whose_jobs_all_failed_says_so(runs, tmp_path):
    table = compare_with_paper([*runs, failed(tmp_path / "lost", method="fedcor")], FINAL)
    (numbers, _) = paper_report_tables(table)
    assert [row[1] for row in numbers.rows if row[0] == "fedcor"] == ["failed"]
    assert not any("fedcor" in note for note in table.notes)
    assert table.verdict == "same 0, undecided 4, opposite 2"


def test_a_failed_reference_leaves_percentages_unknown(runs, tmp_path):
    others = [run for run in runs if run.label != "fedavg"]
    paper = FINAL | {"metric": "at_budget", "columns": {"100": {"fedavg": 1.0, "local": 2.0}}}
    table = compare_with_paper([*others, failed(tmp_path / "lost")], paper)
    assert [table.cell(row, "100").ours for row in ("fedavg", "local")] == [None, None]
    assert "The joules of 100 % are unknown because fedavg failed." in table.notes


def test_a_method_with_several_jobs_is_left_out(runs, write_course):
    other = read_run(write_course("other", [0.1, 0.2], config={"lr": 0.5}))
    table = compare_with_paper([*runs, other], FINAL)
    assert "Left out, because its runs differ in more than the seed: fedavg." in table.notes
    assert {(o.higher, o.lower) for o in table.orderings} == {("local", "fedprox")}


def test_rows_and_columns_by_keys_of_jobs(write_course):
    runs = [
        read_run(write_course(f"{part}-{mu}", [level, level], config={"partition": part, "set": {"train": {"mu": mu}}}))
        for (part, mu), level in {("iid", 0.1): 0.5, ("iid", 0.2): 0.6, ("blocks", 0.1): 0.7}.items()
    ]
    columns = {"digits iid": {"0.1": 1.0, "0.2": 2.0}, "digits blocks": {"0.1": 3.0, "0.2": 4.0}}
    table = compare_with_paper(
        runs, FINAL | {"row_keys": ["train.mu"], "column_keys": ["data", "partition"], "columns": columns}
    )
    ours = {(c.row, c.column): c.ours and c.ours.mean for c in table.cells}
    assert ours == {
        ("0.1", "digits iid"): pytest.approx(50),
        ("0.2", "digits iid"): pytest.approx(60),
        ("0.1", "digits blocks"): pytest.approx(70),
        ("0.2", "digits blocks"): None,
    }
    assert [(o.higher, o.lower, o.column) for o in table.orderings] == [("0.2", "0.1", "digits iid")]
    assert paper_report_tables(table)[0].headers[0] == "Train.mu"


def test_the_accuracy_can_be_chosen(write_course):
    run = read_run(write_course("run", [0.4, 0.4]))
    mean = run.rounds[-1]["accuracy"]["local"]
    assert mean == 0.3
    table = compare_with_paper([run], FINAL | {"accuracy": "local"})
    assert table.cell("fedavg", "final").ours.mean == pytest.approx(100 * mean)
    assert "Accuracy means local accuracy (mean over the clients’ own test sets)." in table.notes


def test_the_tables_have_numbers_and_verdicts(runs):
    numbers, verdicts = paper_report_tables(table := compare_with_paper(runs, FINAL))
    assert numbers.title == "Beside the paper: Table II, Fashion-MNIST (%)"
    assert numbers.rows[0] == ("fedavg", "41.00\n± 1.41", "48.00")
    assert numbers.rows[3] == ("fedcor", "–", "53.00")
    assert verdicts.title == "Orderings: same 0, undecided 1, opposite 2"
    assert verdicts.rows == (("final", "0", "1", "2", "local > fedavg\nlocal > fedprox"),)
    assert ordering_table(table).rows[1] == ("local > fedavg", "final", "4", "-10", "1.41", "opposite")
    assert json.loads(json.dumps(table.to_json()))["verdicts"] == {"same": 0, "undecided": 1, "opposite": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"column_keys": ["data"], "metric": "at_budget"},
            r"column_keys is \['data'\] with metric 'at_budget'\. The metric must be",
        ),
        ({"metric": "best"}, r"\[paper\] metric is 'best'"),
        ({"columns": {"final": {"fedavg": "high"}}}, r"\[paper\] columns.final.fedavg is 'high'"),
        ({"colour": "red"}, r"\[paper\] colour is 'red'"),
        ({"unit": "J"}, r"\[paper\] unit is 'J'; with metric 'final' it must be one of '%', ''"),
        ({"columns": {"finl": {}}}, r"\[paper\] columns has 'finl'; with metric 'final' it must be final"),
        ({"joules_scope": "mine"}, r"\[paper\] joules_scope is 'mine'"),
        ({"metric": "to_accuracy"}, r"\[paper\] columns has 'final'\. An accuracy must be"),
        ({"metric": "at_budget", "columns": {"half": {}}}, r"\[paper\] columns has 'half'\. A budget must be"),
    ],
)
def test_a_bad_table_is_named(change, message):
    with pytest.raises(UserError, match=message):
        read_paper(FINAL | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": "fedavgg"}, r"\[paper\] reference is 'fedavgg', which is not one of the runs"),
        ({"reference": "fedprox"}, r"\[paper\] reference is 'fedprox', but its runs differ in more than the seed"),
        (
            {"columns": {"100": {"simclusst": 1.0}}},
            r"columns.100 has 'simclusst', which is .*; did you mean simclust\?",
        ),
    ],
)
def test_a_table_that_does_not_fit_the_planned_runs_is_refused(tmp_path, change, message):
    configs = [{"method": "fedavg", "seed": s} for s in range(2)]
    configs += [{"method": "fedprox", "seed": 0, "lr": lr} for lr in (0.1, 0.2)]
    plans = [planned_run(tmp_path / str(i), config) for i, config in enumerate(configs)]
    paper = FINAL | {"metric": "at_budget", "columns": {"100": {"fedavg": 1.0, "simclust": 2.0}}}
    validate_paper(paper, plans, ("fedavg", "fedprox", "simclust"))
    with pytest.raises(UserError, match=message):
        validate_paper(paper | change, plans, ("fedavg", "fedprox", "simclust"))


def test_the_server_can_be_left_out(runs):
    paper = FINAL | {"metric": "to_accuracy", "unit": "J", "columns": {"0.4": {"fedavg": 1.0}}}
    with_server, without = (compare_with_paper(runs, paper | {"joules_scope": scope}) for scope in ("all", "clients"))
    assert [t.cell("fedavg", "0.4").ours.mean for t in (with_server, without)] == [30, 24]
    assert any('[paper] joules_scope = "clients" excludes them' in note for note in with_server.notes)


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match=r"\[paper\] source is missing"):
        read_paper({k: v for k, v in FINAL.items() if k != "source"})


def test_round_metrics_are_rows(runs):
    """The last two rounds with the metric: (3 + 5) / 2, and a metric that no round has."""
    lines = tuple(
        {"round": k, "metrics": {"train.silhouette": v} if v else {}} for k, v in enumerate((1.0, 3.0, 5.0, 0))
    )
    names = {"train.silhouette": 0.5, "train.other": 0.7}
    paper = {"source": "T", "metric": "round_metric", "unit": "", "sustained_rounds": 2, "columns": {"final": names}}
    table = compare_with_paper([replace(runs[0], rounds=lines)], paper)
    assert table.cell("train.silhouette", "final").ours.mean == 4.0
    assert table.cell("train.other", "final").ours is None
    assert table.row_keys == "round metric"
