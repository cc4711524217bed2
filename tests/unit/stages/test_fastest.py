"""HACCS: clusters by density, and the fastest clients of each."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from shoal import engine
from shoal.client_table import ClientTable
from shoal.cost.costs import CostModel
from shoal.cost.devices import PROFILES
from shoal.cost.ledger import Ledger
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages.cluster import HellingerOptics
from shoal.stages.fastest import SelectFastest, speeds, training_durations
from shoal.types import ServerState


def same_partition(a, b):
    return np.array_equal(np.equal.outer(a, a), np.equal.outer(b, b))


class TestDense:
    def test_within_reach_by_hand(self):
        # Hellinger² = 1 - Σ √(p q). (1, 0) and (9/10, 1/10): 1 - √.9 = .0513, distance .227: within .25.
        # (1, 0) and (3/4, 1/4): 1 - √.75 = .134, distance .366: not. (9/10, 1/10) and (3/4, 1/4):
        # 1 - √.675 - √.025 = .0203, distance .142: so the chain is one cluster. (0, 1) is alone.
        rows = np.array([[1, 0], [0.75, 0.25], [0, 1], [0.9, 0.1]])
        assert HellingerOptics()(rows, 0).tolist() == [0, 0, 1, 0]
        assert HellingerOptics()(rows[:3], 0).tolist() == [0, 1, 2]
        assert HellingerOptics(radius=0.15)(rows, 0).tolist() == [0, 1, 2, 1]

    def test_one_cluster_per_label_distribution(self):
        rng = np.random.default_rng(0)
        for kinds in (1, 2, 5):
            truth = np.repeat(np.arange(kinds), 6)
            rows = np.stack([rng.multinomial(400, np.eye(5)[k] * 0.9 + 0.02) / 400 for k in truth])
            assert same_partition(HellingerOptics()(rows, 0), truth)

    def test_order_and_seed_do_not_matter(self):
        rows = np.random.default_rng(1).dirichlet([0.5] * 4, 40)
        found = HellingerOptics()(rows, 0)
        assert 1 < len(np.unique(found)) < 40
        for seed in range(5):
            order = np.random.default_rng(seed).permutation(40)
            assert same_partition(HellingerOptics()(rows[order], seed), found[order])

    def test_few_equal_and_different_clients(self):
        assert HellingerOptics()(np.empty((0, 3)), 0).tolist() == []
        assert HellingerOptics()(np.array([[1.0, 0.0]]), 0).tolist() == [0]
        assert HellingerOptics()(np.eye(2), 0).tolist() == [0, 1]
        assert HellingerOptics()(np.full((5, 4), 0.25), 0).tolist() == [0] * 5
        assert HellingerOptics()(np.eye(4), 0).tolist() == [0, 1, 2, 3]

    def test_input_unmodified(self):
        rows = np.random.default_rng(2).dirichlet([1.0] * 3, 6)
        before = rows.copy()
        HellingerOptics()(rows, 0)
        np.testing.assert_array_equal(rows, before)


@dataclass(frozen=True)
class Chip:
    flops_per_s: float
    memory_bytes: int = 1


def state(**chips):
    """a, b and c have similar data, d is alone; 10, 20, 30 and 40 samples."""
    clients = tuple("abcd")
    memory = {
        "represent": ClientTable(clients, {"size": torch.tensor([10, 20, 30, 40])}).to_tree(),
        "cluster": ClientTable(clients, {"group": torch.tensor([0, 0, 0, 1])}).to_tree(),
    }
    return ServerState(0, {}, roster=clients, devices={c: Chip(v) for c, v in chips.items()}, memory=memory)


class TestStage:
    def test_unknown_hardware_gets_the_median_speed(self):
        found = speeds(state(a=2.0, b=4.0, d=8.0), "abcd")
        np.testing.assert_array_equal(found, [2, 4, np.nan, 8])
        np.testing.assert_array_equal(training_durations(np.array([10.0, 20, 30, 40]), found), [5, 5, 7.5, 5])
        np.testing.assert_array_equal(training_durations(np.array([10.0, 20]), np.full(2, np.nan)), [10, 20])

    def test_samples_and_speed_determine_the_fastest_client(self):
        # no loss is known: one client of each cluster. Without hardware a has least to do; c's 30 samples at 4 a second
        # take less than a's 10 at 1
        assert SelectFastest(rho=0.0).fold(replace(state(), cohort_size=2), {}, 0).cohort == ("a", "d")
        assert SelectFastest(rho=0.0).fold(replace(state(a=1.0, b=1.0, c=4.0, d=1.0), cohort_size=2), {}, 0).cohort == (
            "c",
            "d",
        )

    def test_the_next_fastest_replaces_an_absent_client(self):
        here = replace(state(), roster=("b", "c", "d"))
        assert SelectFastest(rho=0.0).fold(replace(here, cohort_size=2), {}, 0).cohort == ("b", "d")

    def test_a_client_without_samples_is_not_fast(self):
        before = state()
        sizes = ClientTable(tuple("abcd"), {"size": torch.tensor([0, 20, 30, 40])}).to_tree()
        before = replace(before, memory={**before.memory, "represent": sizes})
        assert SelectFastest().fold(replace(before, cohort_size=4), {}, 0).cohort == ("b", "c", "d")

    def test_losses_are_remembered_until_a_client_trains_again(self):
        stage = SelectFastest(rho=0.0)

        def trained(before, **loss):
            sent = ClientTable.from_rows(
                {c: {"loss": torch.tensor(v), "norm": torch.tensor(1.0)} for c, v in loss.items()}
            )
            return stage.fold(replace(before, cohort_size=1, memory={**before.memory, "train": sent.to_tree()}), {}, 0)

        once = trained(state(), a=1.0)
        twice = trained(once, d=2.0)
        thrice = trained(twice, a=0.5)
        assert [t.columns["loss"].tolist() for t in (ClientTable.load(s, "select") for s in (once, twice, thrice))] == [
            [1.0],
            [1.0, 2.0],
            [0.5, 2.0],
        ]
        # squares .25 and 4: d is selected 16 times of 17
        drawn = [stage.fold(thrice, {}, seed).cohort for seed in range(170)]
        assert 145 < drawn.count(("d",)) < 170

    def test_no_client_before_there_are_clusters(self):
        assert SelectFastest().fold(ServerState(0, {}, roster=("a",), cohort_size=2), {}, 0).cohort == ()

    def test_state_unmodified(self):
        before = state()
        kept = dict(before.memory)
        SelectFastest().fold(replace(before, cohort_size=2), {}, 0)
        assert before.cohort == ()
        assert dict(before.memory) == kept


def run(clients, cohort=4, slow=(), **options):
    chips = {c: PROFILES["microcontroller" if c in slow else "pi"] for c in clients}
    setting = Setting(load_model("mlp", (6,), 4), rounds=6, cohort_size=cohort, batch_size=8, options=options)
    ledger = Ledger(CostModel(profiles=chips))
    result = engine.run(build("haccs", setting), PlainFleet(clients), rounds=6, seed=0, ledger=ledger)
    return result, [set(p.clients) for p in result.ledger.entries if p.stage == "train"]


class TestMethod:
    def test_fast_clients_represent_slow_ones_with_similar_data(self, tiny):
        """c0 and c4 have the same two classes, and so do c1 and c5. c0 and c1 have fewer samples and slow devices."""
        twins = {c: tiny[c] for c in ("c0", "c1", "c4", "c5")}
        result, cohorts = run(twins, 2, slow=("c0", "c1"), select={"rho": 0.0}, cluster={"radius": 0.5})
        assert ClientTable.load(result.state, "cluster")["group"].tolist() == [0, 1, 0, 1]
        assert cohorts[0] == {"c4", "c5"}
        assert all("c4" in cohort for cohort in cohorts if "c0" in cohort)
        assert all("c5" in cohort for cohort in cohorts if "c1" in cohort)

    def test_noise_changes_the_clusters(self, tiny):
        clear, noisy = (
            ClientTable.load(run(tiny, cluster={"radius": 0.5}, represent={"noise_scale": g})[0].state, "cluster")[
                "group"
            ].tolist()
            for g in (0.0, 4.0)
        )
        assert clear == [0, 1, 2, 3, 0, 1]
        assert noisy != clear

    def test_only_the_label_distribution_is_queried(self, tiny):
        result, _ = run(tiny)
        asked = [p for p in result.ledger.entries if p.stage == "represent"]
        assert len(asked) == 1
        assert int(asked[0].bytes_down.max()) < 200
        assert int(asked[0].bytes_up.max()) < 400


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_slow_clusters_wait_only_if_speed_counts(tiny, rho):
    """Every client is a cluster of its own, and c5 is forty times slower than the next."""
    _, cohorts = run(tiny, slow=("c5",), select={"rho": rho}, cluster={"radius": 0.01})
    assert any("c5" in cohort for cohort in cohorts) == (rho == 0.0)
