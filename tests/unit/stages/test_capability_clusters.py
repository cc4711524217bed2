"""CLSM-FL: fuzzy clusters, what models can do, and models for soft clusters."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import engine, tree
from shoal.client.train import LocalTraining
from shoal.client_table import ClientTable
from shoal.clusterers.fuzzy import FuzzyClusters, memberships
from shoal.errors import UserError
from shoal.fleet.plain import PlainFleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.stages.capability_clusters import FormCapabilityClusters, FuzzyRule, blended_model, capability
from shoal.stages.prediction_similarity import SHARE_STAGE
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Report, ServerState

BLOBS = np.concatenate([np.random.default_rng(k).uniform(0, 1, (7, 3)) + 9 * k for k in range(3)])


class TestMemberships:
    def test_by_hand(self):
        # distances 1 and 3: with m = 2 in proportion to 1/1 and 1/9; with m = 3 to 1/1 and 1/3
        rows, centres = np.array([[1.0]]), np.array([[0.0], [4.0]])
        assert memberships(rows, centres, 2.0)[0] == pytest.approx([0.9, 0.1])
        assert memberships(rows, centres, 3.0)[0] == pytest.approx([0.75, 0.25])

    def test_a_row_on_a_centre_is_its_own(self):
        found = memberships(np.array([[0.0], [4.0]]), np.array([[0.0], [4.0], [4.0]]), 2.0)
        np.testing.assert_allclose(found, [[1, 0, 0], [0, 0.5, 0.5]])


class TestFuzzyClusters:
    def test_two_points_and_a_middle_by_hand(self):
        # by symmetry the centres are 5 - a and 5 + a and the middle belongs to both by 1/2. The others belong to
        # theirs by u = (5 + a)² / ((5 - a)² + (5 + a)²), and c = Σ u² x / Σ u² with (1 - u)² for the far one:
        # a = 5 (u² - (1 - u)²) / (u² + (1 - u)² + 1/4). From a = 4: u = 81/82, a = 3.979, u = .98724, a = 3.978.
        found = FuzzyClusters(2).fit([[0.0], [5.0], [10.0]])
        a = (found.cluster_centers_.max() - found.cluster_centers_.min()) / 2
        assert a == pytest.approx(3.978, abs=5e-4)
        assert found.membership_[1] == pytest.approx([0.5, 0.5])
        assert found.membership_[0].max() == pytest.approx(0.98721, abs=5e-5)

    def test_finds_blobs(self):
        found = FuzzyClusters(3).fit(BLOBS)
        labels = found.membership_.argmax(1)
        assert [len(set(labels[k : k + 7].tolist())) for k in (0, 7, 14)] == [1, 1, 1]
        assert len(set(labels.tolist())) == 3
        assert found.membership_.max(1).min() > 0.9
        assert found.membership_.sum(1) == pytest.approx(np.ones(21))

    def test_new_points_have_the_memberships_of_equal_points(self):
        found = FuzzyClusters(3).fit(BLOBS)
        np.testing.assert_allclose(found.predict_membership(BLOBS[::-1]), found.membership_[::-1])
        assert found.predict(BLOBS).tolist() == found.labels_.tolist() == found.membership_.argmax(1).tolist()

    def test_iterations_are_counted_and_limited(self):
        assert FuzzyClusters(3).fit(BLOBS).n_iter_ > 2
        assert FuzzyClusters(3, max_iter=2).fit(BLOBS).n_iter_ == 2

    def test_negative_values(self):
        found = FuzzyClusters(3).fit(BLOBS).membership_
        np.testing.assert_allclose(FuzzyClusters(3).fit(BLOBS - 30).membership_, found, atol=1e-6)

    def test_order_and_scale_do_not_matter(self):
        found = FuzzyClusters(3).fit(BLOBS).membership_
        order = np.random.default_rng(0).permutation(21)
        np.testing.assert_array_equal(FuzzyClusters(3).fit(BLOBS[order]).membership_, found[order])
        np.testing.assert_allclose(FuzzyClusters(3).fit(8 * BLOBS).membership_, found, atol=1e-6)

    def test_a_row_twice_counts_twice(self):
        once = FuzzyClusters(2).fit([[0.0], [4.0], [10.0]]).cluster_centers_
        twice = FuzzyClusters(2).fit([[0.0], [4.0], [4.0], [10.0]]).cluster_centers_
        assert np.abs(np.sort(once, axis=0) - np.sort(twice, axis=0)).max() > 0.1

    def test_single_equal_and_too_few(self):
        assert FuzzyClusters(3).fit([[1.0, 2.0]]).membership_.tolist() == [[1.0]]
        assert FuzzyClusters(3).fit(np.ones((4, 2))).membership_.tolist() == [[1.0]] * 4
        assert sorted(FuzzyClusters(3).fit([[0.0], [1.0]]).membership_.tolist()) == [[0, 1], [1, 0]]

    def test_input_unmodified(self):
        rows = BLOBS.copy()
        FuzzyClusters(2).fit(rows)
        np.testing.assert_array_equal(rows, BLOBS)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"n_clusters": 0}, "n_clusters is 0"),
            ({"fuzziness": 1.0}, "fuzziness is 1.0"),
            ({"max_iter": 0}, "max_iter is 0"),
        ],
    )
    def test_bad_options(self, bad, message):
        with pytest.raises(UserError, match=message):
            FuzzyClusters(**{"n_clusters": 2} | bad).fit(BLOBS)


MODEL = load_model("linear", (2,), 3)


def linear(*bias):
    """A model that predicts class k with the probability softmax(bias)_k for every sample."""
    like = MODEL.init(0)
    return {k: torch.tensor(bias).float() if v.dim() == 1 else torch.zeros_like(v) for k, v in like.items()}


class TestCapability:
    X, Y = torch.zeros(5, 2), torch.tensor([0, 0, 1, 1, 1])

    def test_by_hand(self):
        # probabilities 1/2, 1/4, 1/4; no sample of class 2: (1/2, 1/4, 0) scaled by 4/3
        found = capability(MODEL, linear(np.log(2.0), 0.0, 0.0), self.X, self.Y)
        assert found.tolist() == pytest.approx([2 / 3, 1 / 3, 0])

    def test_the_number_of_samples_of_a_class_does_not_matter(self):
        found = capability(MODEL, linear(0.0, 0.0, 0.0), self.X, self.Y)
        assert found.tolist() == pytest.approx([0.5, 0.5, 0])


class TestSoft:
    def test_clusters_keep_their_numbers(self):
        member, centres = FuzzyRule()(BLOBS, None, 0)
        for seed in range(5):
            again, _ = FuzzyRule()(BLOBS + 0.5, centres, seed)
            np.testing.assert_allclose(again, member, atol=1e-6)
        swapped, _ = FuzzyRule()(BLOBS, centres[[2, 0, 1]], 0)
        np.testing.assert_allclose(swapped, member[:, [2, 0, 1]], atol=1e-6)


def stage(groups=2):
    clusters = FormCapabilityClusters(FuzzyRule(num_clusters=groups), MODEL)
    return TrainAndAggregate(LocalTraining(MODEL), blended_model, LearningRate(0.1, 10), server_updates=(clusters,))


def state(groups=2, shared=True):
    rows = {"rows": torch.tensor([1.0] * 3 + [0.0] * 6), "labels": torch.tensor([0, 1, 2])}
    memory = {SHARE_STAGE: ClientTable.from_rows({"z": rows}).to_tree()} if shared else {}
    return ServerState(0, {f"cluster-{k:03d}": linear(0.0, 0.0, 0.0) for k in range(groups)}, memory=memory)


def report(*bias, rows=1):
    return Report({"model": linear(*bias)}, {"loss": (1.0, 1.0)}, {"train": rows})


def biases(state):
    return np.array([state.models[k]["head.bias"].tolist() for k in sorted(state.models)])


class TestSemantic:
    def test_models_of_like_ability_share_a_cluster(self):
        reports = {"a": report(9.0, 0.0, 0.0), "b": report(8.0, 0.0, 0.0), "c": report(0.0, 0.0, 9.0)}
        after = stage().fold(state(), reports, 0)
        place = {c: int(m.argmax()) for c, m in after.membership.items()}
        assert place["a"] == place["b"] != place["c"]
        found = biases(after)
        assert found[place["a"]] == pytest.approx([8.5, 0, 0], abs=0.05)
        assert found[place["c"]] == pytest.approx([0, 0, 9], abs=0.05)

    def test_memberships_are_weights(self):
        """Three models with capabilities on a line: each becomes the mean by memberships and samples."""
        reports = {c: report(b, 0.0, 3 - b, rows=n) for c, b, n in (("a", 0.0, 1), ("b", 1.0, 2), ("c", 3.0, 3))}
        after = stage().fold(state(), reports, 0)
        assert 0.01 < float(after.membership["b"].min()) < 0.5
        weights = np.stack([after.membership[c].numpy() * n for c, n in (("a", 1), ("b", 2), ("c", 3))])
        values = np.array([[0, 0, 3], [1, 0, 2], [3, 0, 0]])
        expected = (weights.T @ values) / weights.sum(0)[:, None]
        np.testing.assert_allclose(biases(after), expected, atol=1e-5)

    def test_a_cluster_moves_as_far_as_it_took_part(self):
        first = stage().fold(state(), {"a": report(9.0, 0.0, 0.0), "c": report(0.0, 0.0, 9.0)}, 0)
        k = int(first.membership["c"].argmax())
        # two clients on their own centres: memberships are 1 and 0. Only a comes back: c's cluster stays.
        then = stage().fold(replace(first, round=1), {"a": report(5.0, 0.0, 0.0)}, 0)
        assert int(then.membership["c"].argmax()) == k
        assert biases(then)[k] == pytest.approx([0, 0, 9], abs=1e-3)
        assert biases(then)[1 - k] == pytest.approx([5, 0, 0], abs=1e-3)

    def test_or_in_proportion(self):
        """Only b reports, which is between the clusters: each model moves towards b by b's membership over the mean."""
        reports = {c: report(b, 0.0, 3 - b) for c, b in (("a", 0.0), ("b", 1.0), ("c", 3.0))}
        first = stage().fold(state(), reports, 0)
        then = stage().fold(first, {"b": report(1.0, 0.0, 2.0)}, 0)
        usual = torch.stack(list(then.membership.values())).mean(0)
        step = (then.membership["b"] / usual).clamp(max=1).numpy()[:, None]
        assert step.min() < 0.9
        np.testing.assert_allclose(biases(then), (1 - step) * biases(first) + step * [[1, 0, 2]], atol=1e-5)

    def test_a_late_client_gets_the_mean_membership_while_too_few_models_differ(self):
        # Both models say the same of every class, so nothing is clustered, and b, who is new, gets the mean of old
        # memberships, (1/4, 3/4). Cluster 0 has b's model alone, for a has no part in it; cluster 1 has a's by 1 and
        # b's by 3/4 times 2 rows, (7 + 1.5 * 10) / 2.5 = 8.8. Present are (1/8, 7/8): 0 goes half of its way, 1 all.
        member = {"a": torch.tensor([0.0, 1.0]), "z": torch.tensor([0.5, 0.5])}
        before = replace(state(), membership=member)
        after = stage().fold(before, {"a": report(7.0, 7.0, 7.0), "b": report(10.0, 10.0, 10.0, rows=2)}, 0)
        assert after.membership["b"].tolist() == [0.25, 0.75]
        np.testing.assert_allclose(biases(after), [[5] * 3, [8.8] * 3], atol=1e-5)
        alone = stage().fold(before, {"b": report(7.0, 7.0, 7.0)}, 0)
        np.testing.assert_allclose(biases(alone), [[7] * 3] * 2, atol=1e-5)

    def test_a_client_without_samples_is_ignored(self):
        reports = {"a": report(9.0, 0.0, 0.0), "c": report(0.0, 0.0, 9.0)}
        none = report(0.0, 9.0, 0.0, rows=0)
        one, two = (stage().fold(state(), r, 0) for r in (reports, {**reports, "n": none}))
        assert tree.max_abs_difference(one.models, two.models) == 0
        assert set(two.membership) == {"a", "c"}
        assert tree.max_abs_difference(stage().fold(one, {"n": none}, 0).models, one.models) == 0

    def test_fewer_clients_than_clusters_are_one(self):
        after = stage(3).fold(state(3), {"a": report(1.0, 0.0, 0.0), "b": report(3.0, 0.0, 0.0)}, 0)
        assert after.membership == {}
        np.testing.assert_allclose(biases(after), [[2, 0, 0]] * 3)
        later = stage(3).fold(after, {"c": report(0.0, 9.0, 0.0)}, 0)
        assert set(later.membership) == {"a", "b", "c"}

    def test_equal_models_are_one(self):
        after = stage().fold(state(), {c: report(1.0, 0.0, 0.0) for c in "abc"}, 0)
        assert after.membership == {}
        np.testing.assert_allclose(biases(after), [[1, 0, 0]] * 2)

    def test_without_shared_samples_it_is_plain_averaging(self):
        after = stage().fold(state(shared=False), {"a": report(9.0, 0.0, 0.0), "c": report(0.0, 0.0, 9.0)}, 0)
        assert after.membership == {}
        np.testing.assert_allclose(biases(after), [[4.5, 0, 4.5]] * 2)

    def test_a_round_without_reports_changes_nothing(self):
        before = state()
        after = stage().fold(before, {}, 0)
        assert tree.max_abs_difference(before.models, after.models) == 0
        assert after.memory == before.memory

    def test_names_of_clients_do_not_matter(self):
        reports = {c: report(float(i % 4), 0.0, float(i % 3)) for i, c in enumerate("abcdef")}
        renamed = dict(zip("fbdace", reports.values(), strict=True))
        one, two = (stage().fold(state(), r, 0) for r in (reports, renamed))
        assert tree.max_abs_difference(one.models, two.models) < 1e-6
        assert all(
            torch.allclose(one.membership[c], two.membership[d]) for c, d in zip("abcdef", "fbdace", strict=True)
        )


MODELS = {"cluster-000": linear(4.0, 0.0, 0.0), "cluster-001": linear(0.0, 0.0, 8.0)}


class TestBlend:
    def test_by_memberships(self):
        member = {"a": torch.tensor([0.75, 0.25]), "b": torch.tensor([0.25, 0.75])}
        served = ServerState(1, MODELS, membership=member)
        assert blended_model(served, "a")["blend"]["head.bias"].tolist() == pytest.approx([3, 0, 2])
        assert blended_model(served, "b")["blend"]["head.bias"].tolist() == pytest.approx([1, 0, 6])

    def test_a_client_without_memberships_gets_the_mean_membership(self):
        member = {"a": torch.tensor([0.75, 0.25]), "b": torch.tensor([0.75, 0.25])}
        served = ServerState(1, MODELS, membership=member)
        for client in ("x", None):
            assert blended_model(served, client)["blend"]["head.bias"].tolist() == pytest.approx([3, 0, 2])
        assert blended_model(ServerState(0, MODELS), None)["blend"]["head.bias"].tolist() == pytest.approx([2, 0, 4])


def run(tiny, name, rounds=4, **options):
    setting = Setting(load_model("mlp", (6,), 4), rounds=rounds, cohort_size=6, batch_size=8, options=options)
    return engine.run(build(name, setting), PlainFleet(tiny), rounds=rounds, seed=0, central_samples=tiny.central)


class TestMethod:
    def test_one_cluster_is_fedavg(self, tiny):
        one, plain = run(tiny, "clsm-fl", cluster={"num_clusters": 1}), run(tiny, "fedavg")
        assert tree.max_abs_difference(one.state.models["cluster-000"], plain.state.models["global"]) < 1e-5

    def test_clients_are_served_what_their_classes_need(self, tiny):
        soft, plain = run(tiny, "clsm-fl", cluster={"num_clusters": 4}), run(tiny, "fedavg")
        assert soft.accuracy["local"] > plain.accuracy["local"] + 0.02
        member = torch.stack([soft.state.membership[c] for c in sorted(tiny)])
        assert member.sum(1).tolist() == pytest.approx([1.0] * 6)
        assert int(member[0].argmax()) == int(member[4].argmax()) != int(member[2].argmax())  # c0 and c4: like data

    def test_samples_are_sent_once_and_one_model_in_each_round(self, tiny):
        soft, plain = run(tiny, "clsm-fl"), run(tiny, "fedavg")
        assert [p.round for p in soft.ledger.entries if p.stage == SHARE_STAGE] == [1]
        down = [[int(p.bytes_down.sum()) for p in r.ledger.entries if p.stage == "train"] for r in (soft, plain)]
        assert down[0] == pytest.approx(down[1], rel=0.02)

    def test_centres_show_the_classes_of_a_cluster(self, tiny):
        memory = run(tiny, "clsm-fl").state.memory["train"]
        assert memory["centres"].shape == (3, 4)
        assert memory["centres"].sum(1).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
