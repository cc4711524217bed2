"""The command line as a user meets it: real processes for what matters, one process for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.cli import app

SHOAL = str(Path(sys.executable).parent / "shoal")
GRID = """
title = "mine"
rounds = 2
clients = 6
cohort = 3
[set]
train.clip = 1.0
[grid]
method = ["fedavg", "local"]
seed = [0, 1]
"""
QUICK = ["--rounds", "2", "--clients", "6", "--cohort", "3", "--epochs", "1"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shoal(*words):
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*words):
    result = shoal(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words):
    """Exit code 2, one sentence on stderr, nothing on stdout but the error object, nothing written."""
    result = shoal(*words, "--json")
    assert result.exit_code == 2
    sentence = json.loads(result.stdout)["error"]
    flat = " ".join(result.stderr.split())
    assert "error:" in flat
    assert "Traceback" not in flat
    assert not Path("runs").exists()
    return sentence


def test_run_leaves_a_run_directory_and_prints_json():
    found = as_json("run", "fedavg", *QUICK, "--out", "mine")
    for key in ("method", "seed", "rounds", "accuracy", "loss", "bytes_up", "bytes_down", "wall_s", "run_dir"):
        assert key in found
    assert set(found["accuracy"]) == {"local", "std", "worst10", "f1", "central"}
    assert found["run_dir"] == "mine"
    assert 0 <= found["accuracy"]["local"] <= 1
    assert Path("mine/report.html").stat().st_size > 1_000_000
    lines = Path("mine/rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    assert sum(json.loads(line)["bytes_up"] for line in lines) == found["bytes_up"]


def test_stdout_is_json_alone_in_a_real_process():
    done = subprocess.run([SHOAL, "run", "fedavg", *QUICK, "--json"], capture_output=True, text=True)
    assert done.returncode == 0
    assert json.loads(done.stdout)["method"] == "fedavg"
    assert "round 2/2" in done.stderr


def test_as_a_module_too():
    done = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == "0.1.0"


def test_flags_reach_the_run():
    as_json("run", "fedprox", *QUICK, "--out", "r", "--lr", "0.05", "--momentum", "0.5", "--batch-size", "16",
            "--model", "linear", "--seed", "7", "--fleet", "plain", "--eval-every", "2", "--partition", "shards:2",
            "--set", "train.mu=0.3", "--set", "train.schedule=cosine",
            "--max-train-samples", "500", "--min-samples", "5")  # fmt: skip
    config = json.loads(Path("r/config.json").read_text())
    expected = {
        "lr": 0.05, "momentum": 0.5, "batch_size": 16, "model": "linear", "seed": 7, "fleet": "plain",
        "eval_every": 2, "partition": "shards:2", "max_train_samples": 500, "min_samples": 5, "clients": 6, "cohort": 3,
        "set": {"train": {"mu": 0.3, "schedule": "cosine"}},
    }  # fmt: skip
    assert {k: config[k] for k in expected} == expected


def test_a_fraction_as_cohort():
    as_json("run", "fedavg", "--rounds", "1", "--clients", "10", "--cohort", "0.5", "--out", "r")
    assert json.loads(Path("r/config.json").read_text())["cohort"] == 5


def test_names_are_never_taken_twice():
    first, second = (as_json("run", "fedavg", *QUICK)["run_dir"] for _ in range(2))
    assert first != second


def test_resume_of_a_killed_process():
    words = ["run", "fedavg-ft", "--rounds", "400", "--clients", "6", "--cohort", "3", "--out", "r"]
    child = subprocess.Popen([SHOAL, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(Path("r/checkpoints").glob("round-*")):
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    done = subprocess.Popen([SHOAL, "resume", "r", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(Path("r/rounds.jsonl").read_text().splitlines()) < 3:
        assert done.poll() is None
        time.sleep(0.01)
    other = subprocess.run([SHOAL, "resume", "r"], capture_output=True, text=True)
    assert other.returncode == 2
    assert "is being written by another process" in " ".join(other.stderr.split())
    done.send_signal(2)  # Ctrl-C
    _, stderr = done.communicate(timeout=300)
    assert done.returncode == 130
    assert "shoal resume" in stderr
    assert len(Path("r/rounds.jsonl").read_text().splitlines()) < 400


def test_compare_runs_and_methods():
    as_json("run", "fedavg", *QUICK, "--out", "a")
    found = as_json("compare", "a", "local", *QUICK)
    assert [r["method"] for r in found["runs"]] == ["fedavg", "local"]
    assert Path(found["report"]).exists()
    assert "fedavg" in shoal("compare", "a", found["runs"][1]["run_dir"]).stdout


def test_report_of_several_runs():
    as_json("run", "fedavg", *QUICK, "--out", "a")
    as_json("run", "local", *QUICK, "--out", "b")
    assert as_json("report", "a", "b", "--out", "page.html") == {"report": "page.html"}
    assert Path("page.html").read_text().count("local") > 0


def test_recipe_with_a_grid_is_run_and_not_run_again():
    Path("my.toml").write_text(GRID)
    found = as_json("run", "my.toml")
    assert found["title"] == "mine"
    assert [(r["method"], r["seed"]) for r in found["runs"]] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("local", 0),
        ("local", 1),
    ]
    before = {p: p.stat().st_mtime_ns for p in Path("runs/my").glob("*/result.json")}
    assert len(before) == 4
    assert json.loads(Path("runs/my/local-1/config.json").read_text())["set"] == {"train": {"clip": 1.0}}
    Path("runs/my/local-1/result.json").unlink()
    as_json("run", "my.toml")
    after = {p: p.stat().st_mtime_ns for p in Path("runs/my").glob("*/result.json")}
    assert {p for p in after if before[p] != after[p]} == {Path("runs/my/local-1/result.json")}


def test_a_folder_of_runs_stands_for_its_runs():
    Path("my.toml").write_text(GRID)
    as_json("run", "my.toml")
    names = [f"runs/my/{method}-{seed}" for method in ("fedavg", "local") for seed in (0, 1)]
    assert [r["run_dir"] for r in as_json("compare", "runs/my")["runs"]] == names
    beside = sorted(map(str, Path("runs/my").iterdir()))
    assert "runs/my/report.html" in beside
    assert [r["run_dir"] for r in as_json("compare", *beside)["runs"]] == names
    assert as_json("report", "runs/my") == {"report": "runs/my/report.html"}
    assert as_json("report", "runs/my/report.html", "runs/my/local-0") == {"report": "runs/my/local-0/report.html"}
    for words, sentence in [
        (["report", "runs/my/report.html"], "runs/my/report.html is not a run directory: it is a file."),
        (["compare", "my.toml"], "my.toml is not a run directory: it is a file."),
        (["resume", "runs/my"], "repeat `shoal run RECIPE --out runs/my` with the same flags"),
    ]:
        result = shoal(*words, "--json")
        assert result.exit_code == 2
        assert sentence in json.loads(result.stdout)["error"]


def test_a_stopped_grid_names_the_command_that_continues():
    Path("my.toml").write_text(GRID.replace("rounds = 2", "rounds = 400"))
    child = subprocess.Popen([SHOAL, "run", "my.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(Path("runs/my/fedavg-0/checkpoints").glob("round-*")):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(2)  # Ctrl-C
    _, stderr = child.communicate(timeout=300)
    assert child.returncode == 130
    assert "The same command, `shoal run my.toml --out runs/my` with the same flags, continues." in stderr
    assert "shoal resume" not in stderr


def test_a_title_names_the_keys_that_flags_changed():
    from shoal.cli.flags import overrides
    from shoal.experiment.recipe import load_recipe

    Path("my.toml").write_text(GRID)
    for flags, title in [
        ({}, "mine"),
        ({"rounds": 2, "lr": 0.5}, "mine"),  # as it is written; not written
        ({"rounds": 3, "seed": 7, "set": ["train.clip=2.0"]}, "mine (changed: rounds, seed, train.clip)"),
    ]:
        assert load_recipe(Path("my.toml"), overrides(flags)).title == title


def test_a_bad_reference_of_a_paper_is_refused_before_anything_runs():
    table = 'source = "x"\nmetric = "at_budget"\nreference = "fedavgg"\n[paper.columns.60]\nfedavg = 1.0\n'
    Path("my.toml").write_text(f"{GRID}[paper]\n{table}")
    assert "[paper] reference is 'fedavgg', which is not one of the runs" in refused("run", "my.toml")


def test_a_recipe_that_changed_between_runs_is_refused():
    Path("my.toml").write_text("rounds = 1\nclients = 6\ncohort = 3\n[grid]\nseed = [0, 1]\n")
    as_json("run", "my.toml")
    Path("my.toml").write_text("rounds = 1\nclients = 6\ncohort = 3\nlr = 0.5\n[grid]\nseed = [0, 1]\n")
    result = shoal("run", "my.toml", "--json")
    assert result.exit_code == 2
    assert "was run with lr 0.1, not 0.5" in json.loads(result.stdout)["error"]


def test_another_number_of_clients_is_another_run():
    Path("my.toml").write_text("rounds = 1\nclients = 6\ncohort = 0.5\n[grid]\nseed = [0, 1]\n")
    as_json("run", "my.toml")
    as_json("run", "my.toml", "--cohort", "3")  # the same as half of six
    for flags in (["--clients", "8"], ["--cohort", "2"], ["--fleet", "plain"]):
        result = shoal("run", "my.toml", *flags, "--json")
        assert result.exit_code == 2
        assert "was run with" in json.loads(result.stdout)["error"]


def test_a_grid_over_an_option():
    Path("my.toml").write_text(
        'method = "fedprox"\nrounds = 1\nclients = 6\ncohort = 3\n[grid]\nset.train.mu = [0.1, 1]\n'
    )
    as_json("run", "my.toml")
    found = [json.loads(Path(f"runs/my/{mu}/config.json").read_text())["set"] for mu in ("0.1", "1")]
    assert found == [{"train": {"mu": 0.1}}, {"train": {"mu": 1}}]


@pytest.mark.parametrize("method", ["fedepc", "centralised", "fedavg"])
def test_a_cohort_size_is_announced_if_the_method_uses_it(method):
    stderr = shoal("run", method, *QUICK, "--out", "r").stderr
    uses_cohort_size = method == "fedavg"
    assert ("3 per round" in stderr) == uses_cohort_size
    assert json.loads(Path("r/result.json").read_text())["cohort"] == (3 if uses_cohort_size else None)
    assert ("<dt>cohort</dt>" in Path("r/report.html").read_text()) == uses_cohort_size


def test_what_the_model_cannot_do_is_refused_before_a_run_is_announced():
    result = shoal("run", "fedepc", *QUICK, "--set", "represent.layer=7")
    assert result.exit_code == 2
    assert "is no ReLU" in " ".join(result.stderr.split())
    assert "run directory" not in result.stderr


def test_an_error_in_the_first_round_leaves_no_run_directory():
    quick = ("run", "fedepc", *QUICK, "--out", "mine", "--set")
    assert "layer '7' of model mlp is no ReLU" in refused(*quick, "represent.layer=7")
    assert "not a readable safetensors file" in refused(*quick, "represent.weights=nothing")
    assert not Path("mine").exists()
    as_json(*quick, "represent.layer=1")  # a number, as the shell gives it


def test_a_grid_over_options_that_go_together():
    Path("my.toml").write_text(
        'method = "fedprox"\nrounds = 1\nclients = 6\ncohort = 3\n[grid]\n'
        "set.train = [{mu = 0.1, clip = 1.0}, {mu = 1, clip = 2.0}]\n"
    )
    as_json("run", "my.toml")
    found = [json.loads((p / "config.json").read_text())["set"] for p in sorted(Path("runs/my").glob("mu=*"))]
    assert found == [{"train": {"mu": 0.1, "clip": 1.0}}, {"train": {"mu": 1, "clip": 2.0}}]


def test_a_comparison_uses_the_requested_accuracy():
    as_json("run", "fedavg", *QUICK, "--out", "a")
    command = ("compare", "a", "--to-accuracy", "0.01", "--sustained-rounds", "1", "--accuracy")
    assert "--accuracy is 'best'. It must be central or local" in refused(*command, "best")
    keys = [as_json(*command, kind)["to_accuracy"][0]["accuracy_key"] for kind in ("central", "local")]
    assert keys == ["central", "local"]


def test_pages_of_comparisons_have_names_of_their_own():
    as_json("run", "fedavg", *QUICK, "--out", "a")
    assert as_json("compare", "a")["report"] != as_json("compare", "a")["report"]


def test_nothing_runs_when_one_of_several_is_missing():
    assert "nowhere is neither a run directory nor a method" in refused("compare", "fedavg", "nowhere", *QUICK)


def test_flags_override_a_recipe():
    Path("my.toml").write_text('method = "fedavg"\nrounds = 50\nclients = 6\ncohort = 3\n')
    assert as_json("run", "my.toml", "--rounds", "1", "--seed", "5")["rounds"] == 1


def test_methods():
    listed = as_json("methods")["methods"]
    assert {"fedavg", "fedprox", "fedavg-ft", "local", "centralised"} <= {m["name"] for m in listed}
    options = as_json("methods", "fedprox")["methods"][0]["options"]
    assert options["train"]["mu"]["default"] == 0.1
    assert options["train"]["mu"]["accepted"] == "number, 0 or more"
    assert options["train"]["weighting"]["accepted"] == "size, uniform"
    printed = " ".join(shoal("methods", "fedprox").stdout.split())
    assert f"train.mu 0.1 number, 0 or more {options['train']['mu']['meaning']}" in printed


def test_data_list_and_show():
    assert {"digits", "mnist", "cifar10"} <= {d["name"] for d in as_json("data", "list")["data"]}
    shown = as_json("data", "show", "digits", "--partition", "labels:0-4/5-9", "--clients", "4", "--out", "p.html")
    counts = np.array(shown["counts"])
    assert counts.shape == (4, 10)
    assert counts[:2, 5:].sum() == counts[2:, :5].sum() == 0
    assert 0 <= shown["heterogeneity"]["js_distance"] <= 1
    assert Path("p.html").exists()
    text = shoal("data", "show", "digits", "--clients", "4").stdout
    assert "c0" in text


def test_data_show_sensors():
    assert "sensors" in {d["name"] for d in as_json("data", "list")["data"]}
    shown = as_json("data", "show", "sensors", "--partition", "natural")
    assert np.array(shown["counts"]).shape == (30, 6)
    text = shoal("data", "show", "sensors:7", "--partition", "natural").stdout
    assert "p29" in text and "sitting" in text
    assert "with 6 to 12 activities" in refused("data", "show", "sensors:13")
    assert "only square images" in refused("data", "show", "sensors", "--partition", "natural+rotate:0,90")


def test_profile_accounts_for_the_whole_time():
    parts = as_json("profile", "fedavg", *QUICK)["parts"]
    names = {p["part"] for p in parts}
    assert {"train: clients", "train: server", "select: server", "evaluate: clients", "checkpoint", "other"} <= names
    assert sum(p["fraction"] for p in parts) == pytest.approx(1, abs=0.02)
    assert not Path("runs").exists()
    assert "ms per round" in shoal("profile", "fedavg", *QUICK).stdout


def test_demo_makes_a_page():
    found = as_json("demo")
    assert Path(found["report"]).exists()
    means = {r["method"]: r["accuracy"]["local"] for r in found["runs"]}
    assert means["shoal"] > means["fedavg-ft"] > means["fedavg"]


def test_explain_reports_messages_and_costs():
    (explained,) = as_json(
        "explain", "represent=labels,cluster=similar,select=one-of-each,personalise=fine-tune", *QUICK
    )["methods"]
    steps = {s["step"]: s for s in explained["steps"]}
    assert list(steps) == ["represent", "cluster", "select", "train", "aggregate", "personalise", "serve"]
    (ask,) = steps["represent"]["stages"]
    assert ask["schedule"]["clients"] == "all"
    assert ask["schedule"]["rounds"] == [{"first": 1, "every": 0}]
    assert ask["schedule"]["clients_otherwise"] == "late-joining"
    assert ask["costs"]["in round 1"]["num_clients"] == explained["num_clients"]
    assert ask["costs"]["in round 1"]["bytes_up"] > 0
    assert ask["costs"]["in a usual later round"]["num_clients"] == 0
    (train,) = steps["train"]["stages"]
    cost = train["costs"]["in a usual later round"]
    assert cost["bytes_up"] >= cost["num_clients"] * 4 * explained["num_parameters"]
    assert cost["joules"] > 0
    assert "Eq. 4" in steps["represent"]["source"]
    text = " ".join(shoal("explain", "ditto", *QUICK).stdout.split())
    assert "In every round, the clients of the cohort receive a task." in text
    assert "train" in text
    assert not Path("runs").exists(), "nothing is kept"


def test_explain_runs_late_rounds_of_a_schedule():
    (explained,) = as_json("explain", "fedavg-ft", *QUICK, "--rounds", "25", "--eval-every", "10")["methods"]
    (tune,) = next(s for s in explained["steps"] if s["step"] == "personalise")["stages"]
    assert tune["schedule"]["rounds"] == [{"first": 10, "every": 10}, {"first": 25, "every": 0}]
    num_recipients = {words: cost["num_clients"] for words, cost in tune["costs"].items()}
    num_clients = explained["num_clients"]
    assert num_recipients == {
        "in round 1": 0,
        "in a usual later round": 0,
        "in round 10": num_clients,
        "in a round such as 20": num_clients,
    }


def test_explain_describes_edge_servers():
    (explained,) = as_json("explain", "simclust", *QUICK, "--rounds", "6", "--edges", "2", "--cloud-every-rounds", "2")[
        "methods"
    ]
    edges, cloud, *steps = explained["steps"]
    assert "Assigns each new client to an edge" in edges["summary"]
    assert cloud["stages"][0]["costs"]["in a round such as 4"]["num_clients"] == 2
    assert steps[0]["step"] == "represent"
    (plain,) = as_json("explain", "fedavg", *QUICK, "--edges", "2")["methods"]
    select = next(s for s in plain["steps"] if s["piece"] == "select")
    assert "random clients" in select["summary"], "the summary is that of the stage that runs at every edge server"
    assert "2 edge servers" in shoal("explain", "fedavg", *QUICK, "--edges", "2", "--cloud-every-rounds", "1").stdout


def test_pieces_are_listed_with_their_requirements():
    known = as_json("pieces")["pieces"]
    assert known["personalise"]["gate"]["requires"] == ["several experts to weigh"]
    assert "several experts to weigh" in known["cluster"]["mctc"]["provides"]
    assert "a small network on every client" in shoal("pieces").stdout
    assert "Alg. 2" in shoal("pieces", "personalise").stdout


def test_a_composition_can_be_compared():
    found = as_json("compare", "fedavg", "train=proximal", "aggregate=momentum", *QUICK)
    assert [r["method"] for r in found["runs"]] == ["fedavg", "train=proximal", "aggregate=momentum"]
    assert len({r["run_dir"] for r in found["runs"]}) == 3


def test_an_own_table_with_a_client_column():
    rng = np.random.default_rng(0)
    rows = ["a,b,site,y"]
    for i in range(200):
        y = i % 2
        rows.append(f"{rng.normal() + 3 * y:.3f},{rng.normal():.3f},s{i % 4},{'ill' if y else 'well'}")
    Path("t.csv").write_text("\n".join(rows))
    found = as_json("run", "fedavg", "--data", "t.csv", "--label-column", "y", "--client-column", "site",
                    "--partition", "natural", "--rounds", "5", "--cohort", "1.0", "--out", "r")  # fmt: skip
    assert found["clients"] == 4
    assert found["accuracy"]["central"] > 0.8
    assert json.loads(Path("r/partition.json").read_text())["clients"] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "fedavgg"], "'fedavgg' is not a method, not a recipe file, and not a packaged recipe; did you mean"),
        (["run", "002-tabel1"], "packaged recipe; did you mean 002-table1?"),
        (["run", "recipes/002-table1.toml"], "packaged recipe; did you mean 002-table1?"),
        (["run", "study/own"], "own.toml is a study. Run it with `shoal study`."),
        (["explain", "methods/fedpc"], "packaged recipe; did you mean methods/fedepc?"),
        (["study", "study/onw"], "is not a study file, and not a packaged study; did you mean study/own?"),
        (["recipes", "003-flatt"], "recipe '003-flatt' is not known; did you mean 003-flat?"),
        (["run", "fedavg", "--data", "mnits"], "mnits"),
        (["run", "fedavg", "--data", "no/such.csv"], "no/such.csv"),
        (["run", "fedavg", "--partition", "dirichlett:1"], "dirichlet"),
        (["run", "fedavg", "--partition", "dirichlet:-1"], "-1"),
        (["run", "fedavg", "--partition", "dirichlet:0.01", "--clients", "100"], "dirichlet:0.01"),
        (["run", "fedavg", "--clients", "6", "--cohort", "7"], "cohort is 7; it must be between 1 and the number of"),
        (["run", "fedavg", "--cohort", "0"], "cohort is 0"),
        (["run", "fedavg", "--cohort", "1.5"], "cohort is 1.5; a fraction must be above 0 and at most 1.0"),
        (["run", "fedavg", "--cohort", "many"], "--cohort 'many'"),
        (["run", "fedavg", "--rounds", "0"], "rounds is 0: it must be at least 1"),
        (["run", "fedavg", "--epochs", "0"], "epochs is 0: it must be at least 1"),
        (["run", "fedavg", "--data", "mnits", "--out", "runs/y/z"], "mnits"),
        (["run", "fedavg", "--lr", "-1"], "lr is -1: it must be above 0"),
        (["run", "fedavg", "--momentum", "1.5"], "momentum is 1.5: it must be at least 0 and below 1"),
        (["run", "fedavg", "--lr", "inf"], "lr is inf: it must be a finite number, above 0"),
        (["run", "fedavg", "--set", "train.lr=nan"], "option train.lr is nan: input should be a finite number"),
        (["run", "fedavg", "--device", "meta"], "device is 'meta'; it must be one of cpu"),
        (["run", "fedavg", "--model", "mpl"], "model 'mpl' is not known; did you mean mlp"),
        (["run", "fedavg", "--fleet", "vectro"], "fleet is 'vectro': it must be one of auto, plain, vector, pool, "),
        (["run", "fedavg", "--device", "gpu9"], "device is 'gpu9'; it must be one of cpu"),
        (["run", "fedavg", "--set", "train.mu"], "--set 'train.mu' is not of the form piece.key=value"),
        (["run", "fedavg", "--set", "train.nu=1"], "option train.nu is not known to method fedavg"),
        (["run", "fedavg", "--set", "train.momentun=1"], "known to method fedavg; did you mean train.momentum?"),
        (["compare", "fedepc", "fedavg", "--set", "represent.noise_std=1"], "goes under [only.METHOD] of a recipe"),
        (["run", "fedavg", "--lr", "1e9", "--rounds", "3"], "diverged"),
        (["run", "none.toml"], "`shoal methods` and `shoal recipes` list the names"),
        (["resume", "nowhere"], "nowhere is not a run directory"),
        (["report", "nowhere"], "nowhere is not a run directory"),
        (["compare", "nowhere"], "nowhere is neither a run directory nor a method"),
        (["compare", "fedavg", "simclusst"], "is neither a run directory nor a method; did you mean simclust?"),
        (["methods", "x"], "'x' is not a method"),
        (["data", "get", "mnits"], "mnits"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(words, message):
    if "diverged" in message:
        result = shoal(*words, "--json")
        assert result.exit_code == 2
        assert message in json.loads(result.stdout)["error"]
        return
    sentence = refused(*words)
    assert message in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds = ", "is not valid TOML"),
        ("roundz = 3", "key 'roundz' is not known; did you mean rounds"),
        ("rounds = 'x'", "rounds is 'x': it must be a whole number, at least 1"),
        ("[grid]\nseed = 3", "grid.seed is 3; it must be a list"),
        ("grid = 3", "grid is 3; it must be a table of lists"),
        ("set = 4", "set is 4: it must be a table of tables"),
        ("[set]\ntrain = 4", "set.train"),
        ("[grid]\nseed = [0, 0]", "two points of the grid are called '0'"),
    ],
)
def test_bad_recipes(text, message):
    Path("bad.toml").write_text(text)
    assert message in refused("run", "bad.toml")


def test_a_local_recipe_comes_before_the_packaged_one_of_the_same_name():
    Path("mine").mkdir()
    Path("t.csv").write_text("a,label\n" + "".join(f"{i % 7},{i % 2}\n" for i in range(80)))
    for name in ("plain-digits", "mine/own"):
        Path(f"{name}.toml").write_text('data = "t.csv"\nmethod = "local"\nclients = 3\nrounds = 1\nfleet = "vector"\n')
    for name in ("plain-digits", "plain-digits.toml", "mine/own"):
        result = as_json("run", name)
        assert (result["method"], result["clients"], result["rounds"]) == ("local", 3, 1)


def test_a_packaged_recipe_is_found_from_any_folder_and_printed():
    assert as_json("run", "methods/fedprox", *QUICK, "--fleet", "vector")["method"] == "train=proximal"
    assert Path("runs/fedprox-digits-seed0/result.json").exists()
    assert "proximal" in json.dumps(as_json("methods", "methods/fedprox"))
    Path("flat.toml").write_text(shoal("recipes", "003-flat").stdout)
    assert as_json("recipes", "003-flat")["text"] == Path("flat.toml").read_text()
    flat = next(recipe for recipe in as_json("recipes")["recipes"] if recipe["name"] == "003-flat")
    assert flat == {"name": "003-flat", "title": "Without edge servers, Fashion-MNIST, Dirichlet 0.1", "num_jobs": 6}
    assert "003-flat" in shoal("recipes").stdout


def test_bad_files():
    Path("empty.csv").write_text("")
    assert "empty.csv" in refused("run", "fedavg", "--data", "empty.csv")
    Path("t.csv").write_text("a,b\n1,2\n3,4\n")
    assert "label" in refused("run", "fedavg", "--data", "t.csv")
    np.savez("t.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    assert "every feature is the same number" in refused("run", "fedavg", "--data", "t.npz")
    Path("cut.npz").write_bytes(Path("t.npz").read_bytes()[:100])
    assert "cut.npz" in refused("run", "fedavg", "--data", "cut.npz")


def test_a_client_column_asks_for_the_natural_partition():
    Path("t.csv").write_text("a,site,label\n" + "".join(f"{i % 7},s{i % 3},{i % 2}\n" for i in range(90)))
    shown = as_json("data", "show", "t.csv", "--client-column", "site")
    assert shown["clients"] == ["s0", "s1", "s2"]
    sentence = refused("data", "show", "t.csv", "--client-column", "site", "--partition", "iid")
    assert "divides the samples again" in sentence


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,label\n1,x\n2,\n3,y\n", "1 rows have an empty label"),
        ("a,label\n1,100000000000000000000\n2,1\n3,1\n", "too large"),
        ("a,label\n1e300,0\n2,1\n3,1\n", "column 'a' has 1 values that are missing, NaN, infinite or beyond 1e30"),
        ("a;label\n1;0\n2;1\n", "separated by something other than commas"),
        ("a,b,label\n1,2,0\n2,foo,1\n", "--client-column b"),
    ],
)
def test_bad_tables(rows, message):
    Path("t.csv").write_text(rows)
    assert message in refused("data", "show", "t.csv", "--min-samples", "1")


def test_shifted_clients_are_named():
    shown = as_json("data", "show", "digits", "--clients", "4", "--partition", "iid+invert:0.5")
    assert len(shown["shifts"]) == 2
    assert (
        "shifted clients: 2 x"
        in shoal("data", "show", "digits", "--clients", "4", "--partition", "iid+invert:0.5").stdout
    )


def test_grids_are_checked_before_anything_runs():
    for grid in ('method = ["fedavg", "nope"]', "cohort = [3, 50]", 'model = ["mlp", "mpl"]'):
        Path("g.toml").write_text(f"rounds = 1\nclients = 6\n[grid]\n{grid}\n")
        refused("run", "g.toml")


def test_usage_errors_are_one_sentence_and_json_too():
    done = subprocess.run([SHOAL, "run", "fedavg", "--rounds", "x", "--json"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "rounds" in json.loads(done.stdout)["error"]
    assert len(done.stderr.strip().splitlines()) == 1
    assert subprocess.run([SHOAL, "--version"], capture_output=True, text=True).stdout.strip() == "0.1.0"


def test_places_that_cannot_be_written():
    Path("file").write_text("")
    assert "is a file" in refused("run", "fedavg", *QUICK, "--out", "file")
    assert "cannot be" in refused("run", "fedavg", *QUICK, "--out", "file/sub")
    assert "cannot be" in refused("run", "fedavg", *QUICK, "--out", "/proc/nothing/x")
    as_json("run", "fedavg", *QUICK, "--out", "a")
    result = shoal("report", "a", "--out", "file/x.html", "--json")
    assert result.exit_code == 2
    assert "cannot be written" in json.loads(result.stdout)["error"]


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from shoal.cli import app; app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    )
    for words in (["--help"], ["run", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"
    assert "--partition" in done.stdout


def test_methods_do_not_wait_for_scikit_learn():
    """It takes a second to load, and only runs with clusters need it."""
    at_exit = "import atexit, sys; atexit.register(lambda: print('sklearn' in sys.modules))"
    command = [sys.executable, "-c", f"{at_exit}; from shoal.cli import main; main()", "methods"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, is_loaded = done.stdout.splitlines()
    assert any("fedepc" in line for line in lines)
    assert is_loaded == "False"


class TestJoules:
    def test_devices_and_links_change_seconds_and_joules_only(self):
        one = as_json("run", "fedavg", *QUICK, "--out", "one")
        two = as_json("run", "fedavg", *QUICK, "--out", "two", "--devices", "phone", "--link", "lte-m")
        assert one["accuracy"] == two["accuracy"]
        assert one["flops"] == two["flops"]
        assert one["client_joules"]["training"] / two["client_joules"]["training"] == pytest.approx(
            (5.0 / 2e9) / (3.0 / 5e9)  # watts per operation a second of a pi and of a phone
        )
        assert two["sim_time_s"] > one["sim_time_s"]

    def test_a_budget_stops_early_and_a_resume_does_not_go_on(self):
        long = ["--rounds", "9", *QUICK[2:]]
        whole = as_json("run", "fedavg", *long, "--out", "whole")
        half = sum(whole["client_joules"][k] for k in ("preparation", "training", "communication")) / 2
        short = as_json("run", "fedavg", *long, "--out", "short", "--budget-joules", str(half))
        assert short["completed_rounds"] < 9
        assert "the clients' budget of" in short["stop_reason"]
        lines = Path("whole/rounds.jsonl").read_text().splitlines()
        mine = Path("short/rounds.jsonl").read_text().splitlines()
        assert mine == lines[: short["completed_rounds"]]
        again = as_json("resume", "short")
        assert again["completed_rounds"] == short["completed_rounds"]
        assert again["stop_reason"] == short["stop_reason"]

    def test_devices_that_changed_since_the_run_are_refused(self):
        board = "flops_per_s = 1e9\nactive_w = 3\nidle_w = 1\nmemory_bytes = 1000000000\n"
        Path("b.toml").write_text(f"[mine]\n{board}")
        as_json("run", "fedavg", *QUICK, "--devices", "b.toml#mine:0.5,pi:0.5", "--out", "r")
        facts = json.loads(Path("r/devices.json").read_text())
        assert set(facts["clients"].values()) == {"b.toml#mine", "pi"}
        assert facts["devices"]["b.toml#mine"]["active_w"] == 3
        as_json("resume", "r")
        Path("b.toml").write_text(f"[mine]\n{board}".replace("active_w = 3", "active_w = 30"))
        result = shoal("resume", "r", "--json")
        assert result.exit_code == 2
        assert "r was run with other values of b.toml#mine, and" in json.loads(result.stdout)["error"]

    def test_the_log_of_a_run_that_ends_early_has_the_reason(self):
        result = shoal("run", "fedavg", "--rounds", "9", *QUICK[2:], "--battery-joules", "1e-9", "--out", "r")
        last, why = result.stderr.strip().splitlines()[-2:]
        done = json.loads(Path("r/result.json").read_text())
        assert "round 2/9" in last  # six clients, three in a round, each once
        assert why.endswith("every battery is empty")
        assert (done["num_depleted_clients"], done["num_late_reports"]) == (6, 0)

    def test_the_ledger_is_written_and_adds_up(self):
        result = as_json("run", "repclust", *QUICK, "--out", "one")
        pages = [json.loads(line) for line in Path("one/ledger.jsonl").read_text().splitlines()]
        assert [(p["round"], p["stage"]) for p in pages] == [(1, "represent"), (1, "train"), (2, "train")]
        assert sum(sum(p["bytes_up"]) for p in pages) == result["bytes_up"]
        assert sum(sum(p["radio_joules"]) for p in pages) == pytest.approx(result["joules"]["communication"])
        clusters = result["cluster_joules"].values()
        assert sum(c["num_clients"] for c in clusters) == 6
        for part in ("preparation", "training", "communication"):
            assert sum(c[part] for c in clusters) == pytest.approx(result["client_joules"][part])
        assert result["joules"]["total"] == pytest.approx(
            sum(result["joules"][k] for k in ("preparation", "training", "communication", "server"))
        )

    def test_noise_on_label_distributions_has_a_guarantee(self):
        silent = as_json("run", "simclust", *QUICK, "--out", "one")
        assert "privacy" not in silent
        noisy = as_json("run", "simclust", *QUICK, "--set", "represent.noise_scale=1.0", "--out", "two")["privacy"]
        assert noisy["sigma"] == pytest.approx(0.1)
        assert noisy["local_epsilon"] == pytest.approx(159.44, abs=0.01)
        assert 0 < noisy["record_epsilon"] < noisy["local_epsilon"]
        assert -0.5 <= noisy["ari"] <= 1
        assert noisy["noise_on"] == "label distributions"
        assert "adjusted Rand index" in Path("two/report.html").read_text()

    def test_noise_on_labels_for_balanced_cohorts_has_a_guarantee(self):
        assert "privacy" not in as_json("run", "shoal", *QUICK, "--out", "one")
        noisy = as_json("run", "shoal", *QUICK, "--set", "represent.noise_scale=1.0", "--out", "two")["privacy"]
        assert noisy["noise_on"] == "label distributions"
        assert noisy["local_epsilon"] == pytest.approx(159.44, abs=0.01)

    @pytest.mark.parametrize(("epochs", "warned"), [(0, False), (1, True)])
    def test_noise_without_protection_gives_a_warning(self, epochs, warned):
        options = ["--set", "represent.noise_std=0.2", "--set", f"represent.epochs={epochs}"]
        stderr = " ".join(shoal("run", "fedepc", *QUICK, *options, "--out", "one").stderr.split())
        assert ("An ε above 100 means no protection" in stderr) == warned

    def test_noise_on_sparsity_vectors_has_a_guarantee(self):
        assert "privacy" not in as_json("run", "fedepc", *QUICK, "--out", "one")
        options = ["--set", "represent.noise_std=0.05", "--set", "represent.epochs=0"]
        noisy = as_json("run", "fedepc", *QUICK, *options, "--out", "two")["privacy"]
        assert json.loads(Path("two/result.json").read_text())["privacy"] == noisy
        assert noisy["sigma"] == 0.05
        assert 0 < noisy["record_epsilon"] < noisy["local_epsilon"]
        assert noisy["noise_on"] == "sparsity vectors"
        page = Path("two/report.html").read_text()
        assert "sparsity vectors" in page
        assert "label distributions" not in page
        assert "adjusted Rand index" not in page
        adapted = as_json("run", "fedepc", *QUICK, *options[:2], "--out", "three")["privacy"]
        assert adapted["record_epsilon_without_adaptation"] == noisy["record_epsilon"]
        assert adapted["record_epsilon"] > noisy["record_epsilon"]

    def test_diverse_clusters_are_compared_by_their_objectives(self):
        noisy = as_json("run", "repclust", *QUICK, "--set", "represent.noise_scale=0.000001", "--out", "one")["privacy"]
        assert "ari" not in noisy
        for name in ("within", "between"):
            assert noisy["objectives"][name] == pytest.approx(noisy["objectives_without_noise"][name], rel=0.3)

    def test_a_deadline_that_no_report_meets_gives_a_warning(self):
        result = shoal(
            "run", "simclust", *QUICK, "--set", "represent.noise_scale=1.0", "--deadline-s", "1e-9", "--out", "one"
        )
        assert result.exit_code == 0
        assert "Round 1 has no participants" in " ".join(result.stderr.split())
        assert "ari" not in json.loads(Path("one/result.json").read_text())["privacy"]

    def test_options_are_checked_against_the_cohort_of_the_run(self):
        assert as_json("run", "powerd", *QUICK, "--set", "select.candidates=4")["cohort"] == 3

    def test_codecarbon_measures_this_process(self):
        measured = as_json("run", "fedavg", *QUICK, "--measure", "codecarbon", "--country", "ESP")["measured"]
        assert measured["joules"] > 0
        assert measured["country"] == "ESP"
        assert sum(measured["parts_joules"].values()) == pytest.approx(measured["joules"])
        assert measured["source"]

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (["--devices", "pie"], "did you mean pi?"),
            (["--link", "wify"], "did you mean wifi"),
            (["--battery-joules", "-1"], "battery_joules is -1: it must be above 0"),
            (["--measure", "meter"], "measure is 'meter'"),
            (["--country", "ESP"], "country is 'ESP', but no energy is measured"),
            (["--measure", "codecarbon", "--country", "XYZ"], "XYZ"),
        ],
    )
    def test_bad_input(self, flags, sentence):
        assert sentence in refused("run", "fedavg", *QUICK, *flags)


def test_clusters_are_in_result_json():
    planted = ["--partition", "groups:2,1.0", "--clients", "8", "--rounds", "2"]
    found = as_json("run", "fedepc", *planted, "--out", "r")
    assert json.loads(Path("r/result.json").read_text())["clusters"] == found["clusters"]
    assert [c["model"] for c in found["clusters"]] == [f"expert-{k:03d}" for k in range(len(found["clusters"]))]
    members = [c for cluster in found["clusters"] for c in cluster["clients"]]
    assert sorted(members) == sorted(json.loads(Path("r/partition.json").read_text())["clients"])
    assert -0.5 <= found["clusters_ari"] <= 1
    assert as_json("compare", "r")["runs"][0]["num_clusters"] == len(found["clusters"])
    assert "clusters" not in as_json("run", "fedavg", *QUICK, "--out", "one")
    assert as_json("compare", "one")["runs"][0]["num_clusters"] is None


def test_unseen_clients_are_evaluated():
    result = as_json("run", "fce", *QUICK, "--unseen", "0.3", "--out", "done")
    assert as_json("evaluate", "done")["accuracy"] == pytest.approx(result["accuracy"])
    found = as_json("evaluate", "done", "--unseen")
    assert list(found["clients"]) == sorted(json.loads(Path("done/partition.json").read_text())["unseen"])
    assert len(found["clients"]) == found["num_unseen_clients"] == 2
    assert "2 unseen clients" in shoal("evaluate", "done", "--unseen").stdout
    assert "without --unseen" in refused("evaluate", "done", "--infer-from-inputs")
    assert (
        "with serve.rule=energy: 2 unseen clients"
        in shoal("evaluate", "done", "--unseen", "--set", "serve.rule=energy").stdout
    )
    lines = [line.strip() for line in shoal("evaluate", "done", "--unseen").stdout.splitlines()]
    for client, score in found["clients"].items():
        models_text = ", ".join(f"{name}: {count}" for name, count in score["samples_by_model"].items())
        assert models_text in next(line for line in lines if line.startswith(client))
    assert "train.lr=1 cannot be changed after training" in refused("evaluate", "done", "--set", "train.lr=1")


def test_unseen_clients_of_a_run_without_any_are_refused():
    as_json("run", "fedavg", *QUICK, "--out", "done")
    assert "has no unseen clients" in refused("evaluate", "done", "--unseen")
    assert "neither a number of clients" in refused("run", "fedavg", "--unseen", "some")
    assert "leave one to train" in refused("run", "fedavg", *QUICK, "--unseen", "6")
    assert "is not a run directory" in refused("evaluate", "nowhere")
