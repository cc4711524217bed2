"""The examples of the documentation are run as they are written."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from shoal.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w.-]+\.\w+)\n")


class Block(NamedTuple):
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the page tells the reader to create."""
        named = FILE_NAME.match(self.text)
        return named.group(1) if named else None

    @property
    def commands(self) -> list[list[str]]:
        lines = self.text.splitlines() if self.language == "console" else []
        return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("$ shoal ")]


def blocks(page):
    return [Block(*fence) for fence in FENCE.findall((ROOT / page).read_text())]


def shoal(words):
    result = CliRunner().invoke(app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def readers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules_before = set(sys.modules)
    yield
    for name in set(sys.modules) - modules_before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def follow(page, languages):
    """Follows the page from its top to its end: creates files, runs commands, runs Python."""
    names: dict[str, object] = {}
    done = 0
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python" and "python" in languages:
            exec(compile(block.text, page, "exec"), names)
            done += 1
        for words in block.commands if "console" in languages else ():
            result = shoal(words)
            assert result.exit_code == 0, f"{words}: {result.stderr}"
            done += 1
    return done


@pytest.mark.parametrize("page", ["docs/getting-started.md", "docs/recipes.md", "docs/energy.md", "docs/compose.md"])
def test_commands_do_what_the_page_says(page):
    assert follow(page, {"console"}) >= 4
    if page.endswith("recipes.md"):
        assert sorted(p.name for p in Path("runs/prox").iterdir() if p.is_dir()) == [
            *("fedavg-0", "fedavg-1", "fedprox-0", "fedprox-1"),
        ]
        assert sorted(p.name for p in Path("runs/prox-7").iterdir() if p.is_dir()) == ["fedavg", "fedprox"]
        assert len(list(Path("runs/longer/checkpoints").iterdir())) == 1


def test_python_page():
    assert follow("docs/python.md", {"python"}) >= 6


def test_clusterers_page():
    assert follow("docs/clusterers.md", {"python"}) == 5
    import shoal.clusterers

    page = (ROOT / "docs/clusterers.md").read_text()
    assert all(f"| `{name}" in page for name in shoal.clusterers.__all__)


def test_own_model_page(capsys):
    assert follow("docs/own-model.md", {"python", "console"}) == 2
    assert "not stacked" not in " ".join(capsys.readouterr().err.split())  # both networks of the page can be


def test_readme():
    assert follow("README.md", {"python"}) >= 1


def test_privacy_page():
    assert follow("docs/privacy.md", {"console"}) == 3
    privacy = [json.loads(Path(f"runs/{run}/result.json").read_text())["privacy"] for run in ("adapted", "received")]
    assert privacy[0]["record_epsilon_without_adaptation"] == privacy[1]["record_epsilon"]


def test_methods_page():
    assert follow("docs/methods.md", {"console"}) == 4


ROW = re.compile(r"^\| `(shoal [^`]+)` \| (.+?) \| .+ \|$", re.MULTILINE)
REFUSALS = ROW.findall((ROOT / "docs/errors.md").read_text())


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "mine"
    assert shoal(["run", "fedavg", "--clients", "5", "--rounds", "1", "--out", str(folder)]).exit_code == 0
    return folder


def test_bytes_are_quoted_right(finished_run):
    page = (ROOT / "docs/evaluation.md").read_text()
    line = json.loads((finished_run / "ledger.jsonl").read_text().splitlines()[0])
    assert f"A `fedavg` task is {line['bytes_down'][0]:,} bytes, a report {line['bytes_up'][0]:,}" in page


def test_every_file_of_a_run_is_explained(finished_run):
    page = (ROOT / "docs/runs.md").read_text()
    same = page[page.index("## The same bytes") :]
    for file in finished_run.iterdir():
        if file.suffix in (".json", ".jsonl"):
            assert f"| `{file.name}` |" in page
            assert f"`{file.name}`" in same


@pytest.mark.parametrize(("command", "sentence"), REFUSALS, ids=[command for command, _ in REFUSALS])
def test_errors_are_quoted_right(command, sentence, finished_run):
    Path("my.csv").write_text("y,site,a,b\n" + "".join(f"{i % 2},s{i % 4},{i},{i * i}\n" for i in range(40)))
    Path("latin.csv").write_text("y,größe\n0,1\n", encoding="latin-1")
    Path("notes.html").write_text("my notes")
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(finished_run)
    result = shoal(shlex.split(command)[1:])
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_the_page_of_errors_is_read():
    assert len(REFUSALS) > 20


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PAGES = sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    file = ROOT / page
    for target, anchor in LINK.findall(file.read_text()):
        target_file = file.parent / target if target else file
        assert target_file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target_file.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{target}#{anchor}"


def test_every_page_is_in_the_index():
    listed = {target for target, _ in LINK.findall((ROOT / "docs/index.md").read_text())}
    assert listed == {p.name for p in ROOT.glob("docs/*.md")} - {"index.md"} | {"../SECURITY.md"}
