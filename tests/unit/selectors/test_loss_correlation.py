"""Clients selected by how their losses change together (FedCor)."""

import numpy as np
import pytest
from selector_inputs import NUM_CLIENTS, ONES, SAMPLE_FRACTIONS, SIGMA, read_only

from shoal.errors import UserError
from shoal.selectors import loss_correlation
from shoal.selectors.loss_correlation import LossCorrelation


class TestPick:
    # p = 1/3. First scores: (4 + 3) / 2 / 3 = 1.17 for 0 and for 1, 2.25 / 1.5 / 3 = .5 for 2. Given 0, the variance of
    # 1 is 4 - 9/4 = 1.75 and its score sqrt(1.75) / 3 = .44: less than .5, so 2 is next.
    SIGMA = read_only([[4, 3, 0], [3, 4, 0], [0, 0, 2.25]])
    SHARE = read_only([1 / 3, 1 / 3, 1 / 3])

    def test_by_hand(self):
        for k, chosen in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2])):
            assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), k, np.ones(3)).tolist() == chosen

    def test_discount(self):
        # .9 * 1.17 = 1.05 for 0: now 1 is first
        assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), 1, [0.9, 1, 1]).tolist() == [1]
        assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), 2, [0.9, 1, 1]).tolist() == [1, 2]
        assert loss_correlation.pick(self.SIGMA, self.SHARE, range(3), 1, [0.4, 0.4, 1]).tolist() == [2]

    def test_weights(self):
        assert loss_correlation.pick(self.SIGMA, [0, 0, 1], range(3), 1, np.ones(3)).tolist() == [2]

    def test_the_absent_count_in_the_objective(self):
        # 1 lowers its own loss and that of 0, which is absent: (3 + 4) / 2 = 3.5 beats 9 / 3 = 3, which beats 4 / 2 = 2
        sigma = [[4, 3, 0], [3, 4, 0], [0, 0, 9]]
        assert loss_correlation.pick(sigma, np.ones(3), [1, 2], 1, np.ones(3)).tolist() == [1]
        assert loss_correlation.pick(sigma, [0, 1, 1], [1, 2], 1, np.ones(3)).tolist() == [2]

    def test_follows_a_relabelling(self):
        order = np.random.default_rng(1).permutation(NUM_CLIENTS)
        found = loss_correlation.pick(SIGMA, SAMPLE_FRACTIONS, range(NUM_CLIENTS), 5, ONES)
        again = loss_correlation.pick(SIGMA[np.ix_(order, order)], SAMPLE_FRACTIONS[order], range(NUM_CLIENTS), 5, ONES)
        assert sorted(order[again]) == found.tolist()

    def test_perfect_copies_and_no_variance(self):
        # 0, 1 and 2 are one client three times; after one of them only 3 has information left
        copies = np.zeros((5, 5))
        copies[:3, :3] = 1.0
        copies[3, 3] = 0.01
        assert loss_correlation.pick(copies, np.ones(5), range(5), 2, np.ones(5)).tolist() == [0, 3]
        assert loss_correlation.pick(copies, np.ones(5), range(5), 5, np.ones(5)).tolist() == [0, 1, 2, 3, 4]
        assert loss_correlation.pick(np.zeros((4, 4)), np.ones(4), range(4), 2, np.ones(4)).tolist() == [0, 1]

    def test_bad_input(self):
        with pytest.raises(UserError, match="square"):
            loss_correlation.pick(np.ones((2, 3)), np.ones(2), [0], 1, np.ones(2))
        with pytest.raises(UserError, match="discount"):
            loss_correlation.pick(np.eye(2), np.ones(2), [0], 1, np.ones(3))
        with pytest.raises(UserError, match="weights has nan"):
            loss_correlation.pick(np.eye(2), [1, np.nan], [0], 1, np.ones(2))


def log_likelihood(changes, weights, model):
    from scipy.stats import multivariate_normal

    total = 0.0
    for row, w in zip(changes, weights, strict=True):
        heard = np.isfinite(row)
        sigma = model.covariance_[np.ix_(heard, heard)]
        total += w * multivariate_normal.logpdf(row[heard], model.mean_[heard], sigma)
    return total


class TestLossCorrelation:
    CHANGES = read_only(np.random.default_rng(2).normal(size=(9, 2)) @ np.random.default_rng(3).normal(size=(2, 6)))

    def test_two_clients_by_hand(self):
        # mean square [[1, 1], [1, 1]] has the eigenvalue 2 along (1, 1) / sqrt(2); with noise^2 = .01,
        # X X' = (2 - .01) / 2 everywhere, so Sigma is .995 + .01 on the diagonal and .995 off it
        model = LossCorrelation(dimension=1, noise=0.1).fit(read_only([[1, 1], [-1, -1]]))
        assert model.mean_ == pytest.approx([0, 0])
        assert model.covariance_ == pytest.approx(np.array([[1.005, 0.995], [0.995, 1.005]]))
        assert np.abs(model.embedding_[:, 0]) == pytest.approx([0.995**0.5, 0.995**0.5])

    def test_weights_by_hand(self):
        # mean (3 * 2 + 0) / 4 = 1.5, variance (3 * .25 + 2.25) / 4 = .75
        model = LossCorrelation(noise=0.1).fit([[2.0], [0.0]], weights=read_only([3, 1]))
        assert model.mean_ == pytest.approx([1.5])
        assert model.covariance_ == pytest.approx(np.array([[0.75]]))

    def test_missing_reports_by_hand(self):
        # Client 1 misses the last two of six rounds, all means are 0. Its slope on client 0 is (1 + 1) / 4 = 1/2 over
        # the rounds that both report, with the residuals .5, -.5, -.5, .5: variance 1/4. Client 0 has the variance
        # 22/6 over all six. Hence cov = 1/2 * 22/6 = 11/6 and var = 1/4 * 22/6 + 1/4 = 7/6.
        changes = read_only([[1, 1], [-1, -1], [1, 0], [-1, 0], [3, np.nan], [-3, np.nan]])
        model = LossCorrelation(dimension=2, noise=0.01, num_em_steps=200).fit(changes)
        assert model.covariance_ == pytest.approx(np.array([[22, 11], [11, 7]]) / 6, abs=1e-3)

    def test_nothing_nearby_is_more_likely(self):
        weights = 0.8 ** np.arange(9)[::-1]
        model = LossCorrelation(dimension=2, noise=0.3).fit(self.CHANGES, weights)
        best = log_likelihood(self.CHANGES, weights, model)
        rng = np.random.default_rng(0)
        for _ in range(30):
            x = model.embedding_ + 0.05 * rng.normal(size=model.embedding_.shape)
            other = LossCorrelation(dimension=2, noise=0.3)
            other.mean_, other.covariance_ = model.mean_, x @ x.T + 0.09 * np.eye(6)
            assert log_likelihood(self.CHANGES, weights, other) < best

    def test_with_missing_reports_every_step_is_more_likely(self):
        changes = np.where(np.random.default_rng(4).random((9, 6)) < 0.3, np.nan, self.CHANGES)
        found = [
            log_likelihood(changes, np.ones(9), LossCorrelation(2, 0.3, steps).fit(changes)) for steps in (1, 2, 5, 50)
        ]
        assert (np.diff(found) > 0).all()

    def test_follows_a_relabelling(self):
        changes = np.array(self.CHANGES)
        changes[2, 3] = changes[5, 0] = np.nan
        order = np.random.default_rng(1).permutation(6)
        found = LossCorrelation(3, 0.1).fit(changes).covariance_
        again = LossCorrelation(3, 0.1).fit(changes[:, order]).covariance_
        assert again == pytest.approx(found[np.ix_(order, order)])

    def test_clients_without_reports_and_without_changes(self):
        changes = np.array(self.CHANGES)
        changes[:, 2] = np.nan
        changes[:, 4] = 0.7
        model = LossCorrelation(3, 0.1).fit(changes)
        assert model.mean_[[2, 4]].tolist() == [0.0, pytest.approx(0.7)]
        for quiet in (2, 4):
            assert model.covariance_[quiet] == pytest.approx(0.01 * np.eye(6)[quiet], abs=1e-9)
            assert quiet not in loss_correlation.pick(model.covariance_, np.ones(6), range(6), 2, np.ones(6))

    def test_a_warm_start_remembers_clients_without_reports(self):
        first = LossCorrelation(3, 0.1).fit(self.CHANGES)
        later = np.array(self.CHANGES)
        later[:, 2] = np.nan
        cold = LossCorrelation(3, 0.1).fit(later)
        warm = LossCorrelation(3, 0.1).fit(later, embedding=read_only(first.embedding_))
        assert np.abs(cold.covariance_[2, [0, 1, 3, 4, 5]]).max() < 1e-9
        assert warm.covariance_ == pytest.approx(first.covariance_, abs=0.02)

    def test_without_missing_reports_the_start_does_not_matter(self):
        cold = LossCorrelation(3, 0.1).fit(self.CHANGES)
        warm = LossCorrelation(3, 0.1).fit(self.CHANGES, embedding=np.ones((6, 3)))
        assert warm.covariance_ == pytest.approx(cold.covariance_)

    def test_one_round_or_no_reports_teach_nothing(self):
        for changes in (self.CHANGES[:1], np.full((3, 6), np.nan), np.zeros((4, 6))):
            model = LossCorrelation(3, 0.1).fit(changes)
            assert model.covariance_ == pytest.approx(0.01 * np.eye(6))

    def test_more_dimensions_than_clients(self):
        model = LossCorrelation(15, 0.01).fit(self.CHANGES)
        assert model.embedding_.shape == (6, 15)
        deviations = self.CHANGES - self.CHANGES.mean(axis=0)
        assert model.covariance_ == pytest.approx(deviations.T @ deviations / 9, abs=1e-3)

    def test_a_hundred_clients_in_two_groups_are_distinguished(self):
        # losses move by group; one client of each group leaves little to learn
        rng = np.random.default_rng(6)
        camp = np.arange(100) % 2
        changes = rng.normal(size=(30, 2))[:, camp] + 0.05 * rng.normal(size=(30, 100))
        changes[rng.random(changes.shape) < 0.2] = np.nan
        model = LossCorrelation().fit(changes, 0.95 ** np.arange(30)[::-1])
        chosen = loss_correlation.pick(model.covariance_, np.full(100, 0.01), range(100), 2, np.ones(100))
        assert sorted(camp[chosen]) == [0, 1]
        assert (model.covariance_ == LossCorrelation().fit(changes, 0.95 ** np.arange(30)[::-1]).covariance_).all()

    def test_bad_input(self):
        for kw in ({"dimension": 0}, {"noise": 0.0}, {"noise": np.nan}, {"num_em_steps": 0}):
            with pytest.raises(UserError, match=next(iter(kw))):
                LossCorrelation(**kw)
        for weights in (np.zeros(9), np.ones(8), -np.ones(9), np.full(9, np.nan)):
            with pytest.raises(UserError, match="weights"):
                LossCorrelation().fit(self.CHANGES, weights)
        with pytest.raises(UserError, match="weights"):
            LossCorrelation().fit(np.zeros((0, 6)))
        with pytest.raises(UserError, match="embedding"):
            LossCorrelation().fit(self.CHANGES, embedding=np.zeros((6, 3)))
        with pytest.raises(UserError, match="changes"):
            LossCorrelation().fit(np.zeros(6))
