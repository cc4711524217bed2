"""The commands of serving, and the examples of their page docs/serve.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import UserError
from shoal.serve import Remote
from shoal.serve.app import Service

PAGE = (Path(__file__).parents[2] / "docs/serve.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands():
    """Yields the commands of the page: a line that begins with $, and the lines that continue it."""
    for language, text in FENCE.findall(PAGE):
        if language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                yield part.strip()


def shoal(*words):
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def service(folder):
    """Runs the first two commands of the page, with another port: a run, and a process that serves it."""
    run, serve = list(commands())[:2]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with contextlib.chdir(folder):
        assert shoal(*shlex.split(run)[1:]).exit_code == 0
    command = [sys.executable, "-m", *shlex.split(serve.splitlines()[0]), "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("serving"):
                break
        assert re.fullmatch(r"serving runs/served on http://127\.0\.0\.1:\d+\n", line)
        yield line.split(" on ")[1].strip()
        process.terminate()
        process.wait(20)


@pytest.mark.skipif(shutil.which("curl") is None and not os.environ.get("SHOAL_NO_SKIP"), reason="needs curl")
def test_the_curl_commands_of_the_page_work(service, folder):
    digits = np.zeros((3, 8, 8), np.uint8)
    np.save(folder / "rows.npy", digits)
    Image.fromarray(digits[0]).save(folder / "digit.png")
    curl_commands = [c for c in commands() if c.startswith("curl") and "127.0.0.1:8000" in c]
    responses = []
    for command in curl_commands:
        words = shlex.split(command.replace("http://127.0.0.1:8000", service))
        process = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
        responses.append(json.loads(process.stdout))
    assert len(responses) == 5
    first, rows, image, prior, clusters = responses
    assert first["round"] == 10
    assert first["predictions"][0]["label"] == "0"  # which it is
    assert sum(first["predictions"][0]["probabilities"].values()) == pytest.approx(1)
    assert len(rows["predictions"]) == 3
    assert image["predictions"][0]["confidence"] == pytest.approx(rows["predictions"][0]["confidence"], abs=1e-6)
    assert (prior["status"], clusters["status"]) == (409, 409)
    assert "has no prior correction" in prior["detail"]


def test_the_python_example_of_the_page_works(service, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    code = next(text for language, text in FENCE.findall(PAGE) if language == "python")
    exec(compile(code.replace("http://127.0.0.1:8000", service), "docs/serve.md", "exec"), {})
    assert capsys.readouterr().out.strip().endswith("False")
    cached_files = list((folder / "models").iterdir())
    assert [p.suffix for p in cached_files] == [".safetensors"]


def test_the_limits_are_those_of_the_page(service):
    from shoal.serve.admission import Limits
    from shoal.serve.batching import BatchOptions
    from shoal.serve.inputs import MAX_SAMPLES

    text = shoal("serve", "--help").stdout
    assert "--max-body-mb" in text
    assert Limits().max_body_bytes == 8 * 2**20
    assert (Limits().header_timeout_s, Limits().body_timeout_s, Limits().max_connections, Limits().requests_per_s) == (
        10,
        10,
        1024,
        200,
    )
    assert (BatchOptions().max_samples, BatchOptions().max_wait_s, BatchOptions().max_queued_samples, MAX_SAMPLES) == (
        64,
        0.002,
        4096,
        1024,
    )
    with Remote(service) as remote:
        assert remote.retries == 4


def test_serving_is_refused_with_an_error(runs, tmp_path, monkeypatch):
    run = str(runs("ifca"))

    def error_of(*words):
        process = shoal("serve", *words)
        assert process.exit_code == 2
        assert "Traceback" not in process.stderr
        return " ".join(process.stderr.split())

    assert "there are no tokens" in error_of(run, "--host", "0.0.0.0")
    assert "is not a run directory" in error_of(str(tmp_path))
    assert "there is no such file" in error_of(run, "--tokens", str(tmp_path / "none"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be used on 127.0.0.1: Address already in use" in error_of(
            run, "--port", str(taken.getsockname()[1])
        )
    for module in [name for name in sys.modules if name.startswith("shoal.serve.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "shoal serve needs the extra named serve" in error_of(run)


def test_a_token_is_shown_once(tmp_path):
    file = tmp_path / "tokens.txt"
    made = shoal("token", "lab", "--file", str(file))
    assert made.exit_code == 0
    assert made.stdout.startswith("shoal_")
    assert made.stdout.strip() not in file.read_text()
    also = json.loads(shoal("token", "ward", "--file", str(file), "--json").stdout)
    assert also["name"] == "ward"
    assert len(file.read_text().splitlines()) == 2
    again = shoal("token", "lab", "--file", str(file))
    assert again.exit_code == 2
    assert "already has a token of that name" in " ".join(again.stderr.split())


def test_the_service_reports_that_it_is_alive(service):
    assert httpx.get(f"{service}/healthz", trust_env=False).json() == {"status": "ok", "round": 10}


def test_a_network_that_cannot_be_imported_is_refused_at_the_start(runs, tmp_path):
    """In a folder without its module."""
    run = tmp_path / "run"
    shutil.copytree(runs("ifca"), run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": "nowhere:Net"}))
    with pytest.raises(UserError, match="model 'nowhere:Net' cannot be imported"):
        Service(run)
