from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.report import (
    accuracy_over_bytes,
    accuracy_over_joules,
    accuracy_over_rounds,
    client_boxes,
    joule_bars,
    partition_heatmap,
)
from shoal.store.reader import read_run


def fleet(clients: int, classes: int = 4) -> dict:
    counts = [[(7 * i + 3 * j) % 11 for j in range(classes)] for i in range(clients)]
    return {"clients": [f"c{i}" for i in range(clients)], "classes": list("wxyz")[:classes], "counts": counts}


def test_a_small_fleet_is_drawn_client_by_client():
    figure = partition_heatmap(fleet(3))
    assert list(figure.data[0].y) == ["c0", "c1", "c2"]
    assert list(figure.data[0].z[1]) == [7, 10, 2, 5]
    assert "added up" not in figure.layout.title.text


def test_a_large_fleet_is_binned_and_keeps_its_totals():
    partition = fleet(1001)
    figure = partition_heatmap(partition)
    z = np.array(figure.data[0].z)
    assert z.shape == (167, 4)  # six clients per row, five in the last
    assert z.sum(axis=0).tolist() == np.array(partition["counts"]).sum(axis=0).tolist()
    assert z[0].tolist() == np.array(partition["counts"])[:6].sum(axis=0).tolist()
    assert figure.data[0].y[-1] == "c996 … c1000"
    assert "6 clients added up per row" in figure.layout.title.text


def test_the_plot_over_rounds_shows_local_accuracy_band_and_central_accuracy(write_run):
    figure = accuracy_over_rounds([read_run(write_run(mean=0.96))])
    band, mean, central = figure.data
    assert (list(mean.x), list(mean.y)) == ([2, 4], [0.48, 0.96])
    assert list(band.x) == [2, 4, 4, 2]
    np.testing.assert_allclose(band.y, [0.58, 1.0, 0.86, 0.38])  # never above 100 %
    assert central.line.dash == "dash" and central.line.color == mean.line.color
    assert list(central.y) == [0.5, 0.5]


def test_many_runs_are_drawn_without_bands(write_run):
    runs = [read_run(write_run(f"run-{seed}", seed=seed)) for seed in range(5)]
    figure = accuracy_over_rounds(runs)
    assert len(figure.data) == 10
    assert "Band" not in figure.layout.title.subtitle.text


def test_bytes_of_rounds_without_evaluation_count(write_run):
    figure = accuracy_over_bytes([read_run(write_run(mean=0.75))])
    assert list(figure.data[0].x) == [8.0, 16.0]
    assert "(kB)" in figure.layout.xaxis.title.text


def test_boxes_have_no_clients_without_a_response_and_escape_names(write_run):
    figure = client_boxes([read_run(write_run(clients=("<b>", "plain", "silent")))])
    assert [list(point) for point in figure.data[0].customdata] == [["&lt;b&gt;", 10], ["plain", 10]]


def test_boxes_are_means_of_the_last_twenty_rounds(write_run):
    """The rounds 11, 21 and 30 count. A client without a response in one of them has the mean of the others."""
    run = read_run(write_run(clients=("a", "b")))
    seen = {1: (0.0, 0.0), 11: (0.2, None), 21: (0.4, 0.5), 30: (0.6, 0.7)}
    lines = tuple({**run.clients[0], "round": r, "accuracy": list(a), "num_samples": [9, 9]} for r, a in seen.items())
    figure = client_boxes([replace(run, clients=lines)])
    assert list(figure.data[0].y) == pytest.approx([0.4, 0.6])


def test_a_round_without_any_response_leaves_a_gap(write_run):
    run = read_run(write_run())
    run.rounds[1]["accuracy"].update(local=None, std=None)
    band, mean, _ = accuracy_over_rounds([run]).data
    assert list(mean.y) == [None, 0.75]
    assert list(band.x) == [4, 4]


def test_accuracy_over_joules_is_a_mean_over_seeds(write_course):
    runs = [
        read_run(write_course("a", [0.1, None, 0.3], seed=0)),
        read_run(write_course("b", [0.3, 0.4, 0.5], seed=1)),
        read_run(write_course("c", [0.2, 0.2, 0.2], "local")),
    ]
    band, fedavg, local = accuracy_over_joules(runs).data
    assert list(fedavg.x) == [10, 30]  # the rounds that both seeds evaluated
    np.testing.assert_allclose(fedavg.y, [0.2, 0.4])
    np.testing.assert_allclose(band.y[:2], np.array([0.2, 0.4]) + 0.1 * np.sqrt(2))
    assert (list(local.x), local.name) == ([10, 20, 30], "local")


def test_the_bars_stack_the_joules_to_the_common_accuracy(write_course):
    runs = [
        read_run(write_course("a", [0.5, 0.5, 0.5])),
        read_run(write_course("b", [0.1, 0.4, 0.4], "<b>")),
    ]
    figure = joule_bars(runs, sustained_rounds=2)
    training, preparation, communication, server, *legend = figure.data
    parts = (training, preparation, communication, server)
    # fedavg sustains 40 % at round 2 (20 J), the other at round 3 (30 J). Training has 6 of 10 J, the server 2.
    assert "40%" in figure.layout.title.text
    assert [list(bars.x) for bars in parts] == [[12, 18], [2, 3], [2, 3], [4, 6]]
    assert list(training.y) == ["fedavg", "&lt;b&gt;"]
    assert [bars.marker.pattern.shape for bars in parts] == ["", "/", "x", "."]
    assert [bars.name for bars in legend] == ["training", "preparation", "communication", "server"]
    assert "preparation: 2.00 J (10.00%)" in preparation.customdata[0]
    assert list(server.text) == [" 20.0 J", " 30.0 J"]


def test_without_a_common_accuracy_the_bars_are_of_whole_runs(write_course):
    figure = joule_bars([read_run(write_course("a", [0.5, 0.5, 0.5]))])
    assert figure.layout.title.text == "Joules of the whole run"
    assert list(figure.data[0].x) == [18]


def test_the_lines_and_bars_of_a_dozen_runs_can_be_told_apart(write_course):
    runs = [read_run(write_course(f"m{i}", [0.5], f"m{i}")) for i in range(12)]
    looks = {(line.line.color, line.marker.symbol) for line in accuracy_over_joules(runs).data}
    assert len(looks) == 12
    assert len(set(joule_bars(runs).data[0].marker.color)) == 12
