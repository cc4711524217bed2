"""Worker processes give the same results even if a worker dies, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shoal import engine, tree
from shoal.client.train import LocalTraining
from shoal.fleet.dealing import deal
from shoal.fleet.plain import ClientError, PlainFleet
from shoal.fleet.pool import PoolFleet
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import Phase, Plan, Report, Task


def method(**kw):
    return build("fedavg-ft", Setting(load_model("mlp", (6,), 4), rounds=2, cohort_size=4, batch_size=8, **kw))


def run(fleet):
    return engine.run(method(), fleet, rounds=2, seed=0)


@pytest.fixture
def pool(tiny):
    fleets = []

    def make(inside=PlainFleet, workers=2, pieces=2, **kw):
        fleets.append(PoolFleet(kw.pop("method", method()), tiny, {}, inside, workers, pieces))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.mark.parametrize("inside", [PlainFleet, VectorFleet])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_pool_agrees_with_one_process(tiny, pool, inside, pieces):
    alone = inside(tiny)
    together = pool(inside, pieces=pieces)
    expected, found = run(alone), run(together)
    assert tree.max_abs_difference(expected.state.models, found.state.models) < 1e-6
    assert tree.max_abs_difference(alone.private, together.private) < 1e-6
    assert expected.ledger == found.ledger


def test_plain_workers_give_the_very_same_bits(tiny, pool):
    assert tree.max_abs_difference(run(PlainFleet(tiny)).state.models, run(pool()).state.models) == 0


@dataclass(frozen=True)
class Slow(LocalTraining):
    """Writes a file when it starts, and is slow."""

    folder: str = ""

    def begin(self, task, private):
        Path(self.folder, f"{os.getpid()}").touch()
        time.sleep(0.2)
        return super().begin(task, private)


def test_kill_9_of_a_worker_in_mid_round_changes_nothing(tiny, pool, tmp_path):
    model = load_model("mlp", (6,), 4)
    program = Slow(model, folder=str(tmp_path))
    base = method()
    slow = replace(base, stages=(base.stages[0], replace(base.stages[1], program=program), *base.stages[2:]))
    fleet = pool(method=slow)
    plan = Plan(program, {c: Task({"g": model.init(0)}, {"lr": 0.1}, seed=i) for i, c in enumerate(tiny)})
    expected = PlainFleet(tiny).execute(plan)
    (tmp_path / str(os.getpid())).unlink()
    killer = subprocess.Popen(
        [sys.executable, "-c", KILLER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    found = fleet.execute(plan)
    killed, _ = killer.communicate(timeout=300)
    assert len(set(os.listdir(tmp_path))) == 3  # two workers, and the successor of one of them
    assert int(killed) not in [w.process.pid for w in fleet._workers]
    for c in tiny:
        assert tree.max_abs_difference(expected[c].tensors["model"], found[c].tensors["model"]) == 0


KILLER = """
import os, signal, sys, time
while not (pids := os.listdir(sys.argv[1])):
    time.sleep(0.005)
os.kill(int(pids[0]), signal.SIGKILL)
print(pids[0])
"""


@dataclass(frozen=True)
class Deadly:
    name: str = "deadly"
    batchable: bool = True

    @property
    def phases(self):
        return (Phase("train", 1, 8, lambda s, b: s),)

    def begin(self, task, private):
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self, task, state, counts):
        return Report(), None


def test_work_that_always_kills_its_worker_raises(pool):
    with pytest.raises(ClientError, match="died 3 times over the same work"):
        pool().execute(Plan(Deadly(), {"c0": Task()}))


@dataclass(frozen=True)
class Broken(Deadly):
    name: str = "broken"

    def begin(self, task, private):
        raise KeyError("weights")


def test_an_error_names_the_client(pool):
    with pytest.raises(ClientError, match="program 'broken' failed on client 'c1'"):
        pool().execute(Plan(Broken(), {"c1": Task()}))


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


SCRIPT = """
import sys
from pathlib import Path
from shoal.experiment.run import run_job
from shoal.experiment.job import Job
job = Job(rounds=100000, clients=6, cohort=3, max_train_samples=300, fleet="pool", workers=2, pieces=2)
run_job(job, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_run(tmp_path, signal_number, request):
    before = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "run")], stderr=subprocess.DEVNULL)
    request.addfinalizer(parent.kill)
    lines = tmp_path / "run/rounds.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        assert parent.poll() is None
        time.sleep(0.01)
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.send_signal(signal_number)
    parent.wait(timeout=300)
    for _ in range(500):
        remaining = [pid for pid in workers if Path(f"/proc/{pid}").exists() and "Z" not in process_state(pid)]
        if not remaining:
            break
        time.sleep(0.01)
    assert remaining == []
    assert set(os.listdir("/dev/shm")) <= before


def process_state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:
        return "Z"


def test_models_are_sent_once():
    from shoal.fleet.pool import read_work, work_message

    model, other = {"w": torch.zeros(1000)}, {"w": torch.ones(1000)}
    ten = {f"c{i}": Task({"g": model}, {}, 1) for i in range(10)}
    one = len(work_message("train", {"c0": Task({"g": model}, {}, 1)}, {}, {}))
    assert len(work_message("train", ten, {}, {})) - one < 1000
    sent_models, received_models = {}, {}
    read_work(work_message("train", ten, {}, sent_models), received_models)
    later = work_message("train", {"c10": Task({"g": model}), "c11": Task({"g": other})}, {}, sent_models)
    assert len(later) < 2 * 4000
    _, tasks, _ = read_work(later, received_models)
    assert float(tasks["c10"].models["g"]["w"].sum()) == 0
    assert float(tasks["c11"].models["g"]["w"].sum()) == 1000


@pytest.mark.parametrize("inside", [PlainFleet, VectorFleet])
def test_a_large_round_is_sent_in_pieces(tiny, pool, inside, monkeypatch):
    monkeypatch.setattr("shoal.fleet.dealing.PIECE_CLIENTS", 1)
    model = load_model("mlp", (6,), 4)
    program = LocalTraining(model, epochs=2, batch_size=4, keeps_model=True)
    firsts = [model.init(0), model.init(1)]
    plan = Plan(program, {c: Task({"g": firsts[i % 2]}, {"lr": 0.1}, seed=i) for i, c in enumerate(tiny)})
    fleet, plain = pool(inside=inside, workers=2), PlainFleet(tiny)
    assert len(deal(plan, tiny, 2)) == len(tiny)
    for _ in range(2):
        expected, found = plain.execute(plan), fleet.execute(plan)
        assert list(found) == list(plan.tasks)
        for c in tiny:
            assert tree.max_abs_difference(expected[c].tensors, found[c].tensors) < 1e-5
            assert tree.max_abs_difference(plain.private[c], fleet.private[c]) < 1e-5


def test_a_program_that_changed_runs_in_its_new_form(tiny, pool):
    model = load_model("mlp", (6,), 4)
    fleet = pool()
    for epochs in (1, 3):
        program = LocalTraining(model, epochs=epochs)
        plan = Plan(program, {c: Task({"g": model.init(0)}, {"lr": 0.1}) for c in tiny})
        expected, found = PlainFleet(tiny).execute(plan), fleet.execute(plan)
        assert tree.max_abs_difference(expected["c3"].tensors["model"], found["c3"].tensors["model"]) == 0


def test_an_interrupted_round_leaves_no_stale_reply(tiny, pool, monkeypatch):
    model = load_model("mlp", (6,), 4)
    fleet = pool()
    plans = [
        Plan(LocalTraining(model), {c: Task({"g": model.init(seed)}, {"lr": 0.1}) for c in tiny}) for seed in (1, 2)
    ]

    def interrupted(pipes):
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.fleet.pool.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fleet.execute(plans[0])
    monkeypatch.undo()
    expected, found = PlainFleet(tiny).execute(plans[1]), fleet.execute(plans[1])
    assert tree.max_abs_difference(expected["c3"].tensors["model"], found["c3"].tensors["model"]) == 0
