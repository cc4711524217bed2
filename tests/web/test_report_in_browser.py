"""The report in a browser, opened as a file without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from shoal.experiment.job import Job
from shoal.experiment.run import run_job
from shoal.report import write_page
from shoal.store.reader import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=8000"),
    *("--window-size=1200,3000", "--enable-logging=stderr", "--v=0"),
]


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        if os.environ.get("SHOAL_NO_SKIP"):
            pytest.fail("needs chromium")
        pytest.skip("needs chromium")

    def open_page(page, *flags):
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [CHROMIUM, *FLAGS, profile, *flags, page.resolve().as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    return open_page


def test_the_page_draws_its_plots_without_errors(browser, tmp_path):
    for method in ("fedavg", "local"):
        run_job(Job(method=method, clients=6, rounds=3, cohort=3, max_train_samples=400), tmp_path / method)
    page = write_page([read_run(tmp_path / m) for m in ("fedavg", "local")], tmp_path / "page.html")
    output = browser(page, "--dump-dom")
    assert len(re.findall(r'<svg[^>]*class="main-svg"', output.stdout)) >= 4  # rounds, clients, bytes, partition
    assert "scatterlayer" in output.stdout
    assert "heatmaplayer" in output.stdout
    errors = [line for line in output.stderr.splitlines() if "CONSOLE" in line and "page.html" in line]
    assert errors == []
    browser(page, f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 50_000
