"""Cohorts with flat label distributions: the selection by hand, and how long clients wait."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.selectors.balanced import concentration, fill_cohort, longest_waiting_clients
from shoal.stages.balanced import SelectBalanced
from shoal.types import ServerState


def flattest(counts, last, available, k, share, seed):
    first = longest_waiting_clients(counts, last, available, k, share, seed)
    return fill_cohort(counts, first, available, k, seed)


def chosen(counts, k, last=None, share=0.0, seed=0, there=None):
    counts = np.asarray(counts, dtype=float)
    last = np.zeros(len(counts)) if last is None else last
    return flattest(counts, last, np.ones(len(counts), bool) if there is None else there, k, share, seed).tolist()


class TestByHand:
    def test_concentration(self):
        # (9 + 1) / 16; equal counts 1/2; one class 1; no samples 1
        assert concentration([[3, 1], [2, 2], [5, 0], [0, 0]]).tolist() == [10 / 16, 0.5, 1, 1]

    def test_the_next_client_complements_the_first(self):
        """Client 0 has waited longest and holds (4, 0). With 1: (4, 4), 1/2. With 2: (6, 2), 40/64. With 3: (8, 0)."""
        counts = [[4, 0], [0, 4], [2, 2], [4, 0]]
        last = [0, 1, 1, 1]
        assert chosen(counts, 2, last) == [0, 1]
        # then (4, 4) with 2 is (6, 6), 1/2, and with 3 (8, 4), 80/144
        assert chosen(counts, 3, last) == [0, 1, 2]

    def test_a_share_has_waited(self):
        """Half of four: the two clients that have waited longest have class 0, and the others have class 1."""
        counts = [[1, 0], [1, 0], [1, 0], [0, 1], [0, 1]]
        assert chosen(counts, 4, last=[5, 1, 2, 6, 6], share=0.5) == [1, 2, 3, 4]


class TestEdges:
    def test_no_clients(self):
        assert chosen(np.zeros((0, 3)), 4) == []
        assert chosen([[1, 2]], 4, there=[False]) == []
        assert chosen([[1, 2]], 0) == []

    def test_one(self):
        assert chosen([[1, 2]], 4) == [0]

    def test_fewer_than_wanted(self):
        assert chosen([[1, 2], [3, 0], [0, 0]], 9) == [0, 1, 2]

    def test_a_client_without_samples_comes_last(self):
        counts = [[0, 0], [5, 0], [0, 0], [5, 0]]
        assert chosen(counts, 2) == [1, 3]
        assert {tuple(chosen(counts, 3, seed=s)) for s in range(20)} == {(0, 1, 3), (1, 2, 3)}

    def test_ties_are_broken_at_random(self):
        found = {tuple(chosen(np.ones((4, 3)), 2, seed=s)) for s in range(60)}
        assert len(found) == 6
        assert chosen(np.ones((4, 3)), 2, seed=7) == chosen(np.ones((4, 3)), 2, seed=7)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"counts": [[1, -1]], "last": [0]}, "finite and 0 or more"),
            ({"counts": [1, 2], "last": [0, 0]}, "clients x classes"),
            ({"last": [0]}, "it must have 2"),
            ({"share": 1.5}, "from 0 to 1"),
        ],
    )
    def test_what_is_refused(self, change, message):
        given = {"counts": [[1, 2], [3, 4]], "last": [0, 0], "share": 0.5} | change
        with pytest.raises(UserError, match=message):
            flattest(given["counts"], given["last"], np.arange(len(given["counts"])), 1, given["share"], 0)

    def test_inputs_are_not_changed(self):
        counts, last, there = np.array([[4.0, 0], [0, 4]]), np.array([1.0, 0]), np.array([True, True])
        flattest(counts, last, there, 1, 0.5, 0)
        assert (counts.tolist(), last.tolist(), there.tolist()) == ([[4, 0], [0, 4]], [1, 0], [True, True])


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_order_of_clients_does_not_matter(seed, k):
    """There are no ties: all waiting times differ, and no two cohorts have equal counts."""
    rng = np.random.default_rng(seed)
    counts, last, order = rng.random((8, 4)) * 100, rng.permutation(8), rng.permutation(8)
    straight = flattest(counts, last, np.arange(8), k, 0.3, 1)
    mixed = flattest(counts[order], last[order], np.arange(8), k, 0.3, 2)
    assert sorted(order[mixed].tolist()) == straight.tolist()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 10), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_every_client_is_selected_in_time(seed, k, share):
    """With any labels, a client waits at most as many rounds as it takes to select all others first."""
    rng = np.random.default_rng(seed)
    counts, last = rng.integers(1, 50, (20, 3)).astype(float), np.full(20, -1.0)
    first = max(1, int(np.ceil(share * k)))
    for t in range(4 * -(-20 // first)):
        last[flattest(counts, last, np.arange(20), k, share, t)] = t
        assert t - last.min() <= -(-20 // first)


def state_with_labels(counts):
    counts = torch.tensor(counts, dtype=torch.float32)
    sizes = counts.sum(1)
    rows = {
        f"c{i}": {"labels": p / max(1.0, float(n)), "size": n.long()}
        for i, (p, n) in enumerate(zip(counts, sizes, strict=True))
    }
    return ServerState(
        3,
        {"global": {"w": torch.zeros(1)}},
        roster=tuple(rows),
        memory={"represent": ClientTable.from_rows(rows).to_tree()},
    )


class TestStage:
    COUNTS = ([8, 0], [0, 8], [8, 0], [0, 8], [8, 0], [8, 0])

    def test_the_cohort_and_its_metric(self):
        after = SelectBalanced().fold(replace(state_with_labels(list(self.COUNTS)), cohort_size=2), {}, 0)
        held = np.array(self.COUNTS)[[int(c[1]) for c in after.cohort]].sum(0)
        assert held.tolist() == [8, 8]
        assert after.round_metrics["select.concentration"] == 0.5
        last = ClientTable.load(after, "select")
        assert {c for c, t in zip(last.clients, last["last"].tolist(), strict=True) if t == 3} == set(after.cohort)

    def test_every_client_is_selected_over_rounds(self):
        state, seen = state_with_labels(list(self.COUNTS)), set()
        for t in range(6):
            state = SelectBalanced(waiting_fraction=0.5).fold(replace(state, cohort_size=2, round=t), {}, t)
            seen |= set(state.cohort)
        assert len(seen) == 6

    def test_each_cluster_is_balanced_by_itself(self):
        """Clients 0 and 1 are one cluster, and 2 to 5 the other: one and two of a cohort of three."""
        one, other = torch.tensor([1.0, 0, 0]), torch.tensor([0, 1.0, 0])
        member = {f"c{i}": one if i < 2 else other for i in range(6)}
        for seed in range(5):
            state = replace(state_with_labels(list(self.COUNTS)), membership=member)
            cohort = SelectBalanced(waiting_fraction=0.0).fold(replace(state, cohort_size=3), {}, seed).cohort
            assert sum(c in ("c0", "c1") for c in cohort) == 1
            assert "c3" in cohort, "the only one of its class in its cluster"

    def test_small_clusters_and_clients_without_one_are_selected(self):
        """Clusters of 28, 29 and 2, and a client in none: their shares of 10 places are 4.7, 4.8, 0.3 and 0.2."""
        rng, marks = np.random.default_rng(0), torch.eye(4)
        state = state_with_labels(rng.integers(1, 50, (60, 3)).tolist())
        sizes = np.repeat([0, 1, 2], [28, 29, 2]).tolist()
        state = replace(state, membership={f"c{i}": marks[g] for i, g in enumerate(sizes)})
        last = dict.fromkeys(state.roster, -1)
        for t in range(200):
            state = SelectBalanced().fold(replace(state, cohort_size=10, round=t), {}, t)
            assert len(state.cohort) == 10
            last |= dict.fromkeys(state.cohort, t)
            assert t - min(last.values()) <= 60 / 5, "at most N / (cohort / 2) rounds"

    def test_only_present_clients_that_reported_are_selected(self):
        state = replace(state_with_labels(list(self.COUNTS)), roster=("c0", "c1"))
        assert SelectBalanced().fold(replace(state, cohort_size=4), {}, 0).cohort == ("c0", "c1")
        assert SelectBalanced().fold(ServerState(0, {}, roster=("c0",), cohort_size=4), {}, 0).cohort == ()

    def test_flatter_than_random_cohorts(self):
        counts = np.random.default_rng(0).dirichlet([0.1] * 10, 50) * 400
        state = state_with_labels(counts.tolist())
        spread = []
        for t in range(20):
            state = SelectBalanced().fold(replace(state, cohort_size=10, round=t), {}, t)
            spread.append(state.round_metrics["select.concentration"])
        rng = np.random.default_rng(1)
        chance = [concentration(counts[rng.choice(50, 10, replace=False)].sum(0)) for _ in range(200)]
        assert np.mean(spread) - 0.1 < 0.3 * (np.mean(chance) - 0.1)

    def test_what_is_refused(self):
        with pytest.raises(UserError, match="waiting_fraction is 2"):
            SelectBalanced(waiting_fraction=2)
