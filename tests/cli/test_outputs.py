"""A command replaces only files that shoal wrote, except with --force."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app

QUICK = ("--rounds", "1", "--clients", "6", "--cohort", "3", "--epochs", "1")
SCRIPT = b'print("two years of work")\n'
STUDY = """
title = "A tiny study"
fixed_beforehand = "Nothing."
our_variant = "shoal"
[job]
clients = 6
rounds = 1
epochs = 1
max_train_samples = 200
[variants.shoal]
method = "fedavg"
[cells.even]
partition = "iid"
[budgets.quick]
seeds = [0]
cells.even.variants = ["shoal"]
"""
EXPORTS = [("onnx", ".onnx"), ("torchscript", ".pt"), ("safetensors", ".safetensors")]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert shoal("run", "fedavg", *QUICK, "--out", str(folder)).exit_code == 0
    return str(folder)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shoal(*words):
    result = CliRunner().invoke(app, list(words))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(*words):
    result = shoal(*words)
    assert result.exit_code == 0, result.stderr


def refusal(*words):
    """The sentence with which the command ends; it must have run nothing."""
    result = shoal(*words, "--json")
    assert result.exit_code == 2, result.stdout
    assert not Path("runs").exists(), "the command ran something before it looked at the file"
    return json.loads(result.stdout)["error"]


def commands_with_a_page(run):
    return {
        "report": ("report", run),
        "compare runs": ("compare", run, run),
        "compare methods": ("compare", "fedavg", "local", *QUICK),
        "data show": ("data", "show", "digits", "--clients", "4"),
    }


@pytest.mark.parametrize("command", ["report", "compare runs", "compare methods", "data show"])
def test_a_page_that_shoal_did_not_write_is_not_replaced(command, finished_run):
    page, words = Path("x.html"), commands_with_a_page(finished_run)[command]
    page.write_bytes(SCRIPT)
    sentence = refusal(*words, "--out", "x.html")
    assert sentence == (
        "x.html exists (27 bytes), and shoal did not write it. Move it away, choose another name, or replace it with "
        "--force."
    )
    assert page.read_bytes() == SCRIPT
    succeeds(*words, "--out", "x.html", "--force")
    assert page.read_text().startswith("<!doctype html>")
    succeeds(*words, "--out", "x.html")  # its own page is replaced without a word
    assert [p.name for p in Path().glob(".*")] == []


@pytest.mark.parametrize("command", ["report", "compare methods", "data show"])
@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("name", ["analysis.py", "data.csv", "page"])
def test_a_page_has_the_ending_of_a_page(command, force, name, finished_run):
    Path(name).write_bytes(SCRIPT)
    sentence = refusal(*commands_with_a_page(finished_run)[command], "--out", name, *force)
    assert sentence == f"{name} is no name for an HTML page, which must end in .html. Choose a name that does."
    assert Path(name).read_bytes() == SCRIPT


@pytest.mark.parametrize("command", ["report", "compare methods", "data show"])
def test_a_page_cannot_be_a_folder_or_an_impossible_path(command, finished_run):
    words = commands_with_a_page(finished_run)[command]
    Path("folder.html").mkdir()
    Path("file").write_text("")
    for name in ("folder.html", "."):
        sentence = refusal(*words, "--out", name, "--force")
        assert sentence == f"{name} is a folder. Choose the name of a file, such as {Path(name) / 'page.html'}."
    assert refusal(*words, "--out", "file/x.html").startswith("file/x.html cannot be written: /")
    assert "cannot be written" in refusal(*words, "--out", "/proc/nothing/x.html")


def test_the_default_page_of_a_report_is_guarded_too(finished_run, tmp_path):
    page = Path(finished_run) / "report.html"
    ours = page.read_bytes()
    try:
        page.write_bytes(SCRIPT)
        assert "report.html exists (27 bytes), and shoal did not write it." in refusal("report", finished_run)
        assert "report.html exists (27 bytes), and shoal did not write it." in refusal("resume", finished_run)
        assert page.read_bytes() == SCRIPT
        succeeds("resume", finished_run, "--force")
        assert page.read_bytes() != SCRIPT
    finally:
        page.write_bytes(ours)


def test_a_grid_is_refused_before_its_first_run():
    Path("g.toml").write_text('rounds = 1\nclients = 6\ncohort = 3\n[grid]\nmethod = ["fedavg", "local"]\n')
    mine = Path("mine")
    mine.mkdir()
    (mine / "report.html").write_bytes(SCRIPT)
    assert "mine/report.html exists (27 bytes)" in refusal("run", "g.toml", "--out", "mine")
    assert [p.name for p in mine.iterdir()] == ["report.html"]
    (mine / "report.html").unlink()
    (mine / "local").mkdir()
    (mine / "local" / "notes.txt").write_bytes(SCRIPT)
    assert "--out mine/local exists and is not empty" in refusal("run", "g.toml", "--out", "mine")
    assert [p.name for p in mine.iterdir()] == ["local"]
    (mine / "local" / "notes.txt").unlink()
    (mine / "report.html").write_bytes(SCRIPT)
    succeeds("run", "g.toml", "--out", "mine", "--force")
    succeeds("run", "g.toml", "--out", "mine")


@pytest.mark.parametrize("name", ["study.md", "study.json", "study.html"])
def test_a_study_does_not_replace_files_that_shoal_did_not_write(name):
    Path("tiny.toml").write_text(STUDY)
    mine = Path("mine")
    mine.mkdir()
    (mine / name).write_bytes(SCRIPT)
    words = ("study", "tiny.toml", "--out", "mine")
    for more in ((), ("--report-only",)):
        assert f"mine/{name} exists (27 bytes), and shoal did not write it." in refusal(*words, *more)
    assert [p.name for p in mine.iterdir()] == [name]
    succeeds(*words, "--report-only", "--force")
    succeeds(*words, "--report-only")
    assert len(list(mine.iterdir())) == 3
    assert (mine / name).read_bytes() != SCRIPT


@pytest.mark.parametrize(("format", "ending"), EXPORTS)
def test_an_export_replaces_only_exports(format, ending, finished_run):
    model = Path(f"model{ending}")
    words = ("export", finished_run, "--format", format, "--out", str(model))
    model.write_bytes(SCRIPT)
    sentence = refusal(*words)
    assert sentence.startswith(f"{model} exists (27 bytes), and shoal did not write it.")
    assert model.read_bytes() == SCRIPT
    succeeds(*words, "--force")
    first = model.read_bytes()
    assert first != SCRIPT
    succeeds(*words)
    default = Path(finished_run) / f"served{ending}"
    default.write_bytes(SCRIPT)
    assert "exists (27 bytes)" in refusal(*words[:4])
    default.unlink()
    for wrong in ("model.py", "model", "model.bin"):
        sentence = refusal(*words[:-1], wrong, "--force")
        assert sentence.startswith(
            f"{wrong} is no name for a model in the format {format}, which must end in {ending}."
        )


def test_other_models_in_the_same_formats_are_not_replaced(finished_run):
    import onnx
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3)}, "a.safetensors", {"format": "pt"})
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), "a.pt")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])), "a.onnx")
    checkpoint = next(Path(finished_run).glob("checkpoints/*/state.safetensors"))
    for format, ending in EXPORTS:
        assert "shoal did not write it" in refusal("export", finished_run, "--format", format, "--out", f"a{ending}")
    before = checkpoint.read_bytes()
    refusal("export", finished_run, "--format", "safetensors", "--out", str(checkpoint))
    assert checkpoint.read_bytes() == before


def test_a_device_is_not_replaced_even_by_force(finished_run):
    Path("null.html").symlink_to("/dev/null")
    sentence = refusal("report", finished_run, "--out", "null.html", "--force")
    assert sentence == "null.html is not an ordinary file. Choose another name."
    assert Path("null.html").is_symlink()


def test_a_token_goes_only_into_a_file_of_tokens():
    for name, content in (("script.py", SCRIPT), ("picture.png", b"\x89PNG\xff\xfe\n")):
        Path(name).write_bytes(content)
        assert "`shoal token NAME` makes such a line" in refusal("token", "ward", "--file", name)
        assert Path(name).read_bytes() == content
        served = shoal("serve", "x", "--tokens", name)
        assert served.exit_code == 2 and "`shoal token NAME`" in " ".join(served.stderr.split())
    Path("folder").mkdir()
    for place in ("folder", "script.py/tokens.txt", "nowhere/tokens.txt"):
        assert refusal("token", "ward", "--file", place).startswith(f"{place} cannot be read or written: ")


def test_a_token_begins_a_line_of_its_own():
    succeeds("token", "a", "--file", "t.txt")
    Path("t.txt").write_text(Path("t.txt").read_text().rstrip("\n"))  # as some editors leave it
    succeeds("token", "b", "--file", "t.txt")
    assert [line.split()[0] for line in Path("t.txt").read_text().splitlines()] == ["a", "b"]
