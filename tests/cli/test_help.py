"""Every option and argument has a help text, and the flags of a job are those of its settings."""

from __future__ import annotations

import json

import click
import pytest
import typer
from sentences import complaint
from typer.testing import CliRunner

from shoal.cli import app
from shoal.cli.flags import DATA_FLAGS, FLAGS
from shoal.experiment.declaration import PANELS
from shoal.experiment.job import SETTINGS


def commands(command, path=()):
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))
    yield " ".join(path), command


COMMANDS = dict(commands(typer.main.get_command(app)))
PARAMETERS = [(name, p) for name, command in COMMANDS.items() for p in command.params]


def options(name):
    return {p.name: p for p in COMMANDS[name].params}


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS, ids=[f"{name} {p.name}" for name, p in PARAMETERS])
def test_every_option_and_argument_is_described(name, parameter):
    assert complaint(parameter.name, parameter.help or "") == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_a_command_have_different_descriptions(name):
    texts = [p.help for p in COMMANDS[name].params]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", ["run", "compare", "profile", "explain"])
def test_commands_that_run_have_every_flag_of_a_job(name):
    flags = {opt for p in COMMANDS[name].params for opt in p.opts}
    assert {declared.flag for declared in SETTINGS.values() if declared.flag} <= flags


def test_data_show_has_the_flags_of_the_data():
    assert {"partition", "clients", "max_train_samples", "seed", "drop_columns", "edge_column", "unseen"} <= set(
        DATA_FLAGS
    )
    assert not {"data", "device", "rounds", "keep_checkpoints", "set", "model"} & set(DATA_FLAGS)
    assert set(DATA_FLAGS) <= set(options("data show"))


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_shows_what_is_declared(name):
    declared, option = SETTINGS[name], options("run")[name]
    assert option.help.startswith(declared.help_text)
    assert option.rich_help_panel == declared.panel
    assert declared.unset_meaning or option.default == declared.default
    assert option.show_default == (declared.unset_meaning or True)


def help_text(*words):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "150", "TERM": "dumb"})
    assert result.exit_code == 0
    return " ".join(result.stdout.replace("│", " ").split())


def test_help_is_in_panels_with_ranges_and_defaults():
    text = help_text("run")
    assert [panel for panel in PANELS if f"─ {panel} ─" not in text] == []
    assert "--rounds INTEGER Train for this many global rounds. It must be at least 1. [default: 20]" in text
    assert "[default: (no limit)]" in text
    assert "--fleet auto|plain|vector|pool|flower Choose" in text
    assert "or every job of this recipe. A recipe is a TOML file, or a name from `shoal recipes`." in text


def test_a_flag_at_its_default_does_not_override_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.toml").write_text('method = "local"\nclients = 4\nrounds = 1\ncohort = 2\ncount_idle = true\n')

    def job(*flags):
        result = CliRunner().invoke(app, ["run", "quick.toml", "--out", "r", *flags, "--json"])
        assert result.exit_code == 0, result.stderr
        config = json.loads((tmp_path / "r/config.json").read_text())
        (tmp_path / "r").rename(tmp_path / f"r{len(list(tmp_path.iterdir()))}")
        return config

    assert (job()["clients"], job()["count_idle"]) == (4, True)
    given = job("--clients", "5", "--no-count-idle", "--epochs", "2")
    assert (given["clients"], given["count_idle"], given["epochs"]) == (5, False, 2)


def test_a_repeated_flag_gives_a_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i % 7},{i},{i % 3},{i % 2}\n" for i in range(80))
    (tmp_path / "t.csv").write_text("a,id,b,label\n" + rows)
    words = ["data", "show", "t.csv", "--clients", "2", "--partition", "iid", "--json"]
    assert CliRunner().invoke(app, [*words, "--drop-column", "id", "--drop-column", "b"]).exit_code == 0
    refused = CliRunner().invoke(app, [*words, "--drop-column", "id", "--drop-column", "c"])
    assert refused.exit_code == 2
    assert "'c'" in json.loads(refused.stdout)["error"]


def test_data_show_has_unseen_clients_as_a_run_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data", "show", "--clients", "6", "--unseen", "0.34"]
    shown = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (len(shown["clients"]), len(shown["unseen"])) == (4, 2)
    assert CliRunner().invoke(app, [*words, "--out", "page.html"]).exit_code == 0
    assert (tmp_path / "page.html").exists()
