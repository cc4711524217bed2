"""Secure aggregation: the server sees only the sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import tiny_federation

from shoal import engine, tree
from shoal.client.secure_aggregation import SUM, as_bytes, draw_mask, pair_seed, secure_sum_name, to_fixed_point
from shoal.client_table import ClientTable
from shoal.codec import encode_report, encode_task
from shoal.errors import UserError
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job
from shoal.methods import Setting, build
from shoal.models import load_model

SECURE = "aggregate=secure"


class Listening:
    """A fleet that records its messages and in which some clients do not respond in a stage."""

    def __init__(self, fleet, silent=()):
        self.fleet, self.silent, self.heard = fleet, dict(silent), []
        self.everything = {}

    def roster(self):
        return self.fleet.roster()

    def execute(self, plan):
        reports = self.fleet.execute(plan)
        gone = self.silent.get(plan.program.name, ())
        self.everything[plan.program.name] = reports
        found = {c: r for c, r in reports.items() if c not in gone}
        self.heard.append((plan, found))
        return found


def run_method(method, rounds=2, silent=(), data=None, **kw):
    federation = data or tiny_federation(6, (6,))
    settings = {"model": "mlp", "rounds": rounds, "cohort": 4, "epochs": 1, "batch_size": 8, "lr": 0.05, "seed": 4}
    bench = assemble(Job(method=method, fleet="plain", **settings | kw), method, federation)
    private = {}
    fleet = Listening(make_fleet(bench, private), silent)
    result = engine.run(bench.method, fleet, rounds=rounds, seed=4, central_samples=federation.central)
    return result, fleet, private


def test_only_the_two_clients_of_a_pair_draw_the_same_mask():
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    keys = [bytes([i]) * 32 for i in (1, 2, 3)]
    public = [X25519PrivateKey.from_private_bytes(k).public_key().public_bytes_raw() for k in keys]
    two, all_three, later = secure_sum_name(5, public[:2]), secure_sum_name(5, public), secure_sum_name(6, public[:2])
    ours = pair_seed(keys[0], public[1], two)
    assert ours == pair_seed(keys[1], public[0], two)
    assert ours != pair_seed(keys[2], public[0], two)
    assert ours != pair_seed(keys[0], public[1], later), "another round has other masks"
    assert ours != pair_seed(keys[0], public[1], all_three), "and so has a round that is played again with others"
    assert (draw_mask(ours, 4) == draw_mask(pair_seed(keys[1], public[0], two), 4)).all()


def test_whole_numbers():
    assert to_fixed_point(torch.tensor([1.0, -0.5, 2.0**-24]).double()).tolist() == [2**24, -(2**23), 1]


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_sum_gives_the_mean_of_plain_aggregation(weighting):
    options = {"train": {"weighting": weighting}}
    plain, _, _ = run_method("fedavg", set=options)
    secure, _, _ = run_method(SECURE, set=options)
    assert tree.max_abs_difference(plain.state.models, secure.state.models) < 1e-6
    losses = [[r.metrics["train.loss"] for r in run.rounds] for run in (plain, secure)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_masked_reports_look_like_noise():
    """Model, number of samples and loss are masked: no value of a single report is near the true one."""
    _, fleet, private = run_method(SECURE, rounds=1)
    _, reports = next((p, r) for p, r in fleet.heard if p.program.name == "train")
    for report in reports.values():
        assert set(report.tensors) == {SUM}
        assert report.metrics == {}
        assert set(report.counts.values()) <= {0, 1}
        covered = report.tensors[SUM]["covered"].double()
        assert float(covered.abs().median()) > 2**60, "spread over all 64 bits"
    keys = [as_bytes(kept["key"]) for kept in private.values()]
    for plan, reports in fleet.heard:
        sent = [encode_task(t) for t in plan.tasks.values()] + [encode_report(r) for r in reports.values()]
        assert not any(key in message for key in keys for message in sent), "private keys stay where they are"


def test_a_client_that_does_not_respond_is_removed_from_the_sum():
    """The others reveal the masks that they share with it, and the mean is that of the others."""
    everybody = run_method(SECURE, rounds=1)[1].heard
    cohort = sorted(next(p for p, _ in everybody if p.program.name == "train").tasks)
    gone = cohort[1]
    secure, fleet, _ = run_method(SECURE, rounds=1, silent={"train": [gone]})
    plain, _, _ = run_method("fedavg", rounds=1, silent={"train": [gone]})
    assert tree.max_abs_difference(plain.state.models, secure.state.models) < 1e-6
    asked = next(p for p, _ in fleet.heard if p.program.name == "unmask")
    assert sorted(asked.tasks) == [c for c in cohort if c != gone]
    assert all(list(t.models["silent"]) == [gone] for t in asked.tasks.values())


def test_what_comes_too_late_stays_covered():
    """The server has the report of a client that it treats as not responding, and all masks shared with it."""
    cohort = sorted(next(p for p, _ in run_method(SECURE, rounds=1)[1].heard if p.program.name == "train").tasks)
    late = cohort[0]
    _, fleet, _ = run_method(SECURE, rounds=1, silent={"train": [late]})
    plan, _ = next((p, r) for p, r in fleet.heard if p.program.name == "train")
    unmask, reports_by_client = next((p, r) for p, r in fleet.heard if p.program.name == "unmask")
    assert late not in unmask.tasks, "it is not queried for its own mask"
    covered = fleet.everything["train"][late].tensors[SUM]["covered"].numpy().copy()
    public = {c: as_bytes(k) for c, k in plan.tasks[late].models["keys"].items()}
    for client, report in reports_by_client.items():
        sign = 1 if public[late] < public[client] else -1
        covered -= sign * draw_mask(as_bytes(report.tensors["seeds"][late]), len(covered))
    assert np.median(np.abs(covered.astype(float))) > 2**60


def test_a_client_without_samples_does_not_count_for_a_sum():
    """The sum of one client with samples and two without would be the update of that client."""
    method = build(SECURE, Setting(load_model("mlp", (6,), 4), 1, 3))
    train = next(stage for stage in method.stages if stage.name == "train")
    clients = ("a", "b", "c")
    for sizes, asked in (([1, 1, 1], clients), ([1, 0, 0], ())):
        keys = {c: {"key": torch.zeros(32), "size": torch.tensor(n)} for c, n in zip(clients, sizes, strict=True)}
        state = replace(method.init(0), cohort=clients, memory={"keys": ClientTable.from_rows(keys).to_tree()})
        assert tuple(train.plan(state, 0).tasks) == asked


def test_a_sum_that_cannot_be_read_changes_nothing():
    cohort = sorted(next(p for p, _ in run_method(SECURE, rounds=1)[1].heard if p.program.name == "train").tasks)
    silent = {"train": cohort[:1], "unmask": cohort[1:2]}
    run, _, _ = run_method(SECURE, rounds=1, silent=silent)
    federation = tiny_federation(6, (6,))
    first = build(SECURE, Setting(load_model("mlp", (6,), len(federation.classes)), 1, 4)).init(4)
    assert tree.max_abs_difference(run.state.models, first.models) == 0
    few, fleet, _ = run_method(SECURE, rounds=1, silent={"train": cohort[:2]})
    assert tree.max_abs_difference(few.state.models, first.models) == 0, "two answers are too few for a sum of three"
    assert not any(p.tasks for p, _ in fleet.heard if p.program.name == "unmask")


def test_no_client_trains_for_a_sum_that_is_too_small():
    run, fleet, _ = run_method(SECURE, rounds=1, cohort=2)
    assert not any(p.tasks for p, _ in fleet.heard if p.program.name == "train")
    assert run.rounds[0].bytes_up > 0, "keys were sent"
    with pytest.raises(UserError, match=r"secure\.min_clients is 1; it must be 2 or more"):
        run_method(SECURE, set={"secure": {"min_clients": 1}})


def test_divergence_is_seen_through_the_masks():
    with pytest.raises(UserError, match="training diverged"):
        run_method(SECURE, rounds=3, lr=1e30)


def test_clusters_have_sums_of_their_own():
    method = "represent=labels,cluster=dbscan,aggregate=secure"
    options = {"secure": {"min_clients": 2}}
    secure, _, _ = run_method(method, set=options, cohort=6)
    plain, _, _ = run_method("represent=labels,cluster=dbscan", cohort=6)
    sizes = np.bincount([int(m.argmax()) for m in plain.state.membership.values()])
    assert secure.state.membership.keys() == plain.state.membership.keys()
    for place, name in enumerate(sorted(plain.state.models)):
        if sizes[place] >= 2:
            assert tree.max_abs_difference(plain.state.models[name], secure.state.models[name]) < 1e-6
