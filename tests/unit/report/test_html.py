from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from shoal.errors import UserError
from shoal.report import ComparisonRequest, summarise, write_page
from shoal.report.summary import shown_columns
from shoal.reproduce.paper_table import compare_with_paper
from shoal.store.reader import read_run

HOSTILE = "</script><script>alert(1)</script>"


class Page(HTMLParser):
    """The page as a browser parses it: elements, addresses, plots, and the text outside of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.best: list[str] = []
        self.figures: list[dict] = []
        self.text = ""
        self._open: tuple[str, dict] = ("", {})
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self._open = (tag, dict(attrs))

    def handle_endtag(self, tag):
        self._open = ("", {})

    def handle_data(self, data):
        tag, attrs = self._open
        if attrs.get("type") == "application/json":
            self.figures.append(json.loads(data))
        elif tag not in ("script", "style"):
            self.text += data + "\n"
        if attrs.get("class") == "best":
            self.best.append(data)


def page_of(paths, tmp_path) -> Page:
    return Page(write_page([read_run(p) for p in paths], tmp_path / "out" / "page.html").read_text("utf-8"))


def test_one_run(write_run, tmp_path):
    page = page_of([write_run(mean=0.7512, loss=0.4567)], tmp_path)
    assert "fedavg on digits" in page.text
    for number in ("75.1", "10.0", "55.1", "70.1", "50.0", "0.457", "4.0 kB", "12.0 kB", "1m 30s"):
        assert f"\n{number}\n" in page.text
    assert page.best == []
    assert len(page.figures) == 4
    assert '"method": "fedavg"' in page.text


def test_the_page_loads_nothing(write_run, tmp_path):
    page = page_of([write_run()], tmp_path)
    assert page.addresses == []
    assert not {"link", "iframe", "img", "base"} & set(page.tags)
    assert page.tags.count("script") == 2 + len(page.figures)


def test_the_page_is_written_atomically(write_run, tmp_path):
    page_of([write_run()], tmp_path)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["page.html"]


def test_three_runs_are_compared(write_run, tmp_path):
    paths = [
        write_run("a", mean=0.70, loss=0.2),
        write_run("b", mean=0.80, loss=0.4),
        write_run("c", method="fedprox", mean=0.75, loss=0.3),
    ]
    page = page_of(paths, tmp_path)
    assert "fedavg, fedprox on digits: 3 runs" in page.text
    assert page.best == ["0.200", "80.0", "60.0", "75.0"]  # loss of a, and local, worst tenth and F1 of b
    assert "Means over seeds" not in page.text


def test_seeds_are_aggregated(write_run, tmp_path):
    paths = [write_run(str(seed), seed=seed, mean=mean) for seed, mean in enumerate((0.6, 0.7, 0.8))]
    page = page_of(paths, tmp_path)
    assert "(3 seeds)" in page.text
    assert "70.0\n± 10.0" in page.text


def test_an_unfinished_run(write_run, tmp_path):
    page = page_of([write_run(mean=0.8, done=3)], tmp_path)
    assert page.text.count("unfinished (round 3 of 4)") == 2
    assert "\n40.0\n" in page.text


def test_a_run_without_an_evaluated_round(write_run, tmp_path):
    page = page_of([write_run(done=1)], tmp_path)
    assert "No round has been evaluated yet" in page.text
    assert len(page.figures) == 1


def test_hostile_names_stay_text(write_run, tmp_path):
    path = write_run(HOSTILE.replace("/", ""), method=HOSTILE, clients=(HOSTILE, "b"), config={"model": HOSTILE})
    harmless = page_of([write_run("harmless", clients=("a", "b"), config={"model": "m"})], tmp_path)
    hostile = page_of([path], tmp_path)
    assert hostile.tags == harmless.tags
    assert HOSTILE in hostile.text
    assert hostile.figures[-1]["data"][0]["y"][0] == HOSTILE.replace("<", "&lt;").replace(">", "&gt;")


def test_joules_are_plotted_and_in_a_table(write_course, tmp_path):
    page = page_of([write_course("a", [0.5, 0.5, 0.5]), write_course("b", [0.5, 0.5, 0.5], "local")], tmp_path)
    assert len(page.figures) == 6
    assert page.text.count("30.0 J") == 6  # of each run: in the results, and twice below the bars (total and whole run)
    assert page.text.count("6.0 s") == 2
    assert "3.00 J\n10 %" in page.text  # preparation, below the bars
    assert "6.00 J\n20 %" in page.text  # the server
    assert "Up to 20% of a run’s joules are the server’s" in page.text


def test_a_run_that_ended_early_has_its_reason(write_course, tmp_path):
    page = page_of([write_course("a", [0.5, 0.5], stopped="every battery is empty")], tmp_path)
    assert page.text.count("finished (every battery is empty at round 2)") == 2


def test_settings_energy_and_privacy_are_on_the_page(write_course, tmp_path):
    path = write_course(
        "a", [0.5], config={"devices": "pi:0.5,phone:0.5", "link": "lte-m", "battery_joules": 3.5, "radio_w": None}
    )
    result = json.loads((path / "result.json").read_text())
    result["cluster_joules"] = {"0": {"num_clients": 2, "preparation": 0.0, "training": 7.77, "communication": 1.0}}
    result["privacy"] = {"record_epsilon": 1.234, "objectives": {"within": 0.5678}}
    result["measured"] = {
        "seconds": 5.0, "joules": 123.0, "cpu_joules": 100.0, "ram_joules": 23.0, "gpu_joules": 0.0,
        "kg_co2": 0.00456, "country": "ESP", "source": "estimated <from> load",
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    text = page_of([path], tmp_path).text
    for part in (
        "pi:0.5,phone:0.5",
        "lte-m",
        "3.5",
        "7.77 J",
        "1.234",
        "Differential privacy of what clients send",
        "objectives within",
        "0.5678",
        "123 J",
        "4.56 g",
    ):
        assert f"\n{part}\n" in text
    assert "Source of the processor’s energy: estimated <from> load." in text
    assert "radio w" not in text


def test_the_requested_comparison_is_on_the_page(write_course, tmp_path):
    runs = [read_run(write_course("a", [0.5, 0.5])), read_run(write_course("b", [0.3, 0.3], "local"))]
    numbers = {"source": "Table <II>", "metric": "final", "columns": {"final": {"fedavg": 46.03, "local": 40.0}}}
    request = ComparisonRequest.parse("0.4", "100", sustained_rounds=2)
    path = write_page(runs, tmp_path / "page.html", request=request, paper=compare_with_paper(runs, numbers))
    page = Page(path.read_text("utf-8"))
    assert "Joules, simulated time and rounds to reach an accuracy" in page.text
    assert "Accuracy at a budget of joules" in page.text
    assert "Beside the paper: Table <II> (%)" in page.text
    assert "Orderings: same 0, undecided 1, opposite 0" in page.text
    assert "\n46.03\n" in page.text
    assert page.best == ["50.0", "50.0"]  # central accuracy of fedavg in the results, and its accuracy at the budget


def test_different_partitions_are_all_shown(write_run, tmp_path):
    page = page_of([write_run("a", seed=0), write_run("b", seed=1, clients=("p", "q"))], tmp_path)
    assert "Partition of fedavg clients=2 seed=1" in page.text
    assert [figure["data"][0]["y"] for figure in page.figures[-2:]] == [["a", "b", "c"], ["p", "q"]]


def test_a_page_that_cannot_be_written_is_refused(write_run, tmp_path):
    run = read_run(write_run())
    with pytest.raises(UserError, match="at least one run directory"):
        write_page([], tmp_path / "page.html")
    with pytest.raises(UserError, match="is a folder"):
        write_page([run], tmp_path)
    with pytest.raises(UserError, match="has no rounds yet"):
        write_page([run, read_run(write_run("empty", done=0))], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_clients_of_each_cluster_are_on_the_page(write_course, tmp_path):
    path = write_course("a", [0.5], "fedepc")
    result = json.loads((path / "result.json").read_text())
    many = [f"c{i}" for i in range(15)]
    empty = {"model": "expert-002", "clients": []}
    result["clusters"] = [
        {"model": "expert-000", "clients": many}, {"model": "expert-001", "clients": ["x", "y"]}, empty,
    ]  # fmt: skip
    result["clusters_ari"] = 0.876
    (path / "result.json").write_text(json.dumps(result))
    text = page_of([path], tmp_path).text
    assert "\nfedepc\nexpert-000\n15\nc0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11 ... and 3 more\n" in text
    assert "\nfedepc\nexpert-001\n2\nx, y\n" in text
    assert "the adjusted Rand index of these clusters and the planted groups is 0.88" in text
    assert shown_columns(summarise([read_run(path)]))[6].text(summarise([read_run(path)])[0]) == "2"  # one is empty
