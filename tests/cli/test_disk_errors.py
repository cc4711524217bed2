"""What a command prints and leaves when its run directory cannot be written or belongs to another process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from crashes import SMALL_JOB, digest, preloaded_processes
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import UserError
from shoal.experiment.run import resume_run, run_job
from shoal.store import FORMAT
from shoal.store.run_directory import RunStore

QUICK = ("--clients", "5", "--max-train-samples", "200", "--rounds", "2", "--cohort", "2", "--epochs", "1")


def refusal(*words):
    """Runs a command that must end with exit code 2, and returns its only line."""
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("error: ")


def in_processes(function, arguments, num_outcomes=1):
    """Calls the function in one process for each tuple of arguments, and returns what they put into a queue."""
    context = preloaded_processes()
    queue = context.Queue()
    children = [context.Process(target=function, args=(*a, queue)) for a in arguments]
    for child in children:
        child.start()
    outcomes = [queue.get(timeout=60) for _ in range(num_outcomes * len(children))]
    for child in children:
        child.join()
    return outcomes


def hidden_files(folder):
    return [p.name for p in folder.rglob(".*")]


@pytest.fixture
def small_disk(tmp_path):
    """Yields a disk of 8 MB, and ends the test where no disk can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only a user who may mount a file system can try a full and a read-only disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder, left_bytes=0):
    """Fills the disk except for this many bytes."""
    free = shutil.disk_usage(folder).free
    (folder / "ballast").write_bytes(b"\0" * (free - left_bytes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    run_job(SMALL_JOB, path)
    return path


class TestFullDisk:
    # No free page; one for lines, but none for a checkpoint; and some of both.
    @pytest.mark.parametrize("left_bytes", [0, 4096, 16_384, 40_960])
    def test_the_run_continues_when_there_is_space_again(self, small_disk, finished, left_bytes):
        path = small_disk / "run"

        def fill_after_round_2(record):
            if record.round == 2:
                fill(small_disk, left_bytes)

        with pytest.raises(UserError, match=r"run cannot be written: No space left on device") as caught:
            run_job(SMALL_JOB, path, on_round=fill_after_round_2)
        assert str(caught.value).endswith(f"Correct this, and continue with `shoal resume {path}`.")
        assert hidden_files(small_disk) == []
        for name in ("rounds.jsonl", "ledger.jsonl", "timing.jsonl"):
            assert all(json.loads(line)["round"] <= 3 for line in (path / name).read_text().splitlines())
        assert "run cannot be written: No space left on device" in refusal("resume", path)
        assert hidden_files(small_disk) == []
        (small_disk / "ballast").unlink()
        resume_run(path)
        assert digest(path) == digest(finished)

    def test_a_run_that_cannot_start_leaves_nothing(self, small_disk):
        fill(small_disk)
        sentence = refusal("run", "fedavg", *QUICK, "--out", small_disk / "run")
        assert "run cannot be written: No space left on device" in sentence
        assert [p.name for p in small_disk.iterdir()] == ["ballast"]

    def test_a_page_is_not_cut_short(self, small_disk, finished):
        shutil.copytree(finished, small_disk / "run")
        fill(small_disk, 8192)
        sentence = refusal("report", small_disk / "run", "--out", small_disk / "page.html")
        assert "page.html" in sentence and "No space left on device" in sentence
        assert sorted(p.name for p in small_disk.iterdir()) == ["ballast", "run"]


def refusal_with_limit(limit_bytes, words, outcomes):
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    outcomes.put(refusal(*words))


@pytest.mark.parametrize("limit_bytes", [100, 20_000])
def test_a_limit_on_the_size_of_files(tmp_path, limit_bytes):
    """The limit is below the size of config.json, or of the first checkpoint."""
    words = ("run", "fedavg", *QUICK, "--out", str(tmp_path / "run"))
    (sentence,) = in_processes(refusal_with_limit, [(limit_bytes, words)])
    assert f"{tmp_path / 'run'} cannot be written: File too large" in sentence
    assert list(tmp_path.iterdir()) == []


class TestReadOnly:
    def test_a_disk_that_is_mounted_read_only(self, small_disk, finished):
        shutil.copytree(finished, small_disk / "run")
        before = digest(small_disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        assert "other cannot be written" in refusal("run", "fedavg", *QUICK, "--out", small_disk / "other")
        sentence = refusal("resume", small_disk / "run")
        assert "cannot be written" in sentence and "Read-only file system" in sentence
        assert digest(small_disk / "run") == before

    def test_a_folder_without_permission(self, finished):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copytree(finished, folder / "run")
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
            try:
                with without_privileges():
                    assert "Permission denied" in refusal("resume", folder / "run")
                    sentence = refusal("run", "fedavg", *QUICK, "--out", folder / "other")
                    assert sentence == f"{folder / 'other'} cannot be written: {folder}: Permission denied."
                assert digest(folder / "run") == digest(finished)
            finally:
                for path in (folder, *folder.rglob("*")):
                    path.chmod(0o755)


@contextmanager
def without_privileges():
    """Takes the rights of root away inside the block, since root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def run_it(path, barrier, outcomes):
    torch.set_num_threads(1)
    barrier.wait()
    try:
        run_job(SMALL_JOB, path)
        outcomes.put("finished")
    except UserError as error:
        outcomes.put(str(error))


def test_two_processes_that_start_the_same_run(tmp_path, finished):
    """One of them runs, and the other one is refused. Neither damages the run of the other."""
    barrier = preloaded_processes().Barrier(2)
    other, winner = sorted(in_processes(run_it, [(tmp_path / "run", barrier)] * 2), key="finished".__eq__)
    assert winner == "finished"
    assert "run exists and is not empty" in other
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert digest(tmp_path / "run") == digest(finished)


def create_runs(folder, count, barrier, outcomes):
    for i in range(count):
        barrier.wait()
        try:
            with RunStore.create(folder / f"run-{i}", {"method": "fedavg"}, {"clients": ["c0"]}, {}):
                barrier.wait()
            outcomes.put((i, "created"))
        except UserError as error:
            outcomes.put((i, str(error)))
            barrier.wait()


def test_only_one_of_many_processes_creates_a_run_directory(tmp_path):
    count, num_processes = 20, 4
    barrier = preloaded_processes().Barrier(num_processes)
    outcomes = in_processes(create_runs, [(tmp_path, count, barrier)] * num_processes, count)
    for i in range(count):
        texts = sorted((text for number, text in outcomes if number == i), key="created".__eq__)
        assert texts[-1] == "created"
        assert all("exists and is not empty" in text for text in texts[:-1])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"run-{i}" for i in range(count))


class TestNewerVersion:
    @pytest.fixture
    def unfinished(self, tmp_path, finished):
        shutil.copytree(finished, tmp_path / "run")
        (tmp_path / "run/result.json").unlink()
        return tmp_path / "run"

    def change(self, path, **facts):
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))

    def test_a_run_directory(self, unfinished):
        self.change(unfinished / "about.json", format=FORMAT + 1, shoal="9.1")
        before = digest(unfinished)
        expected = (
            f"{unfinished} was written in format {FORMAT + 1}, but this version of shoal reads format {FORMAT} only: "
            "use the version that wrote it, shoal 9.1, to read it."
        )
        for command in ("resume", "report", "evaluate", "serve", "export"):
            assert refusal(command, unfinished) == expected
        assert digest(unfinished) == before

    def test_a_checkpoint_is_neither_used_nor_removed(self, unfinished):
        self.change(unfinished / "checkpoints/round-000004/state.json", format=FORMAT + 1)
        before = digest(unfinished)
        assert refusal("resume", unfinished) == (
            f"{unfinished / 'checkpoints/round-000004'} was written in format {FORMAT + 1}, but this version of shoal "
            f"reads format {FORMAT} only: use a newer version of shoal to read it."
        )
        assert digest(unfinished) == before
