"""Compares the bandit that selects clients in FedEPC with random selection, in a small simulation.

- Fifty clients have Dirichlet(0.1) labels over ten Gaussian classes and are clustered by their labels.
- Each cluster trains its own softmax regression by federated averaging, one epoch per round, with clients that fit the
  cluster's time budget. A client takes its number of samples divided by its clock rate, and a round lasts as long as
  its slowest client.
- All arms of a seed have the same fleet, the same candidate sets and the same order of samples. The oracles train all
  candidate sets before they choose one.
- The results are differences to random sets within the budget, with standard errors over seeds: the accuracy on the
  clients' own test samples at the end (mean of the last five rounds), over all rounds, and at equal time, which is the
  time after which random sets have run half of their rounds.

The defaults were chosen on other fleets than those of `--first-seed 100 --seeds 12`. Writes `results/bandit.json`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import harness
import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from shoal.rng import derive_seed
from shoal.selectors.bandit import ClientSets, SetBandit, candidate_sets, standardised_contexts, time_budget
from shoal.selectors.sampling import Floats, Indices

RewardSource = Literal["all members", "cohort", "set to set"]
NUM_CLIENTS, CLASSES, FEATURES, BATCH, PROBE, TEST, HISTORY, ROUNDS, RATE = 50, 10, 16, 20, 60, 100, 5, 40, 0.1


@dataclass(frozen=True)
class ClientSamples:
    """The samples of all clients: x [clients, samples, features and a 1], y, and which samples are not padding."""

    x: Floats
    y: Indices
    is_real: Floats

    def select(self, clients: Indices | slice, part: slice = slice(None)) -> ClientSamples:
        return ClientSamples(self.x[clients][:, part], self.y[clients][:, part], self.is_real[clients][:, part])


@dataclass(frozen=True)
class Fleet:
    """The clients of a seed: their data, devices and clusters."""

    train: ClientSamples
    probe: ClientSamples
    test: ClientSamples
    ghz: Floats
    ram_gb: Floats
    sizes: Floats
    cluster: Indices
    mean_weights: Floats = field(init=False)  # [clusters, clients]: the weights of a mean over members
    members: list[Indices] = field(init=False)

    def __post_init__(self) -> None:
        inside = np.arange(self.cluster.max() + 1)[:, None] == self.cluster
        object.__setattr__(self, "mean_weights", inside / inside.sum(axis=1, keepdims=True))
        object.__setattr__(self, "members", [np.flatnonzero(row) for row in inside])

    @property
    def costs_s(self) -> Floats:
        return self.sizes / self.ghz


def make_fleet(seed: int, clusters: int, alpha: float = 0.1, separation: float = 0.6) -> Fleet:
    rng = np.random.default_rng(derive_seed(seed, "fleet"))
    labels = rng.dirichlet(np.full(CLASSES, alpha), NUM_CLIENTS)
    means = separation * rng.normal(size=(CLASSES, FEATURES))
    sizes = np.clip(np.exp(rng.normal(np.log(90), 0.6, NUM_CLIENTS)), 20, 300).astype(np.int64)

    def draw(counts: Indices) -> ClientSamples:
        max_samples = int(-(-counts.max() // BATCH) * BATCH)
        y = np.stack([rng.choice(CLASSES, size=max_samples, p=p) for p in labels])
        x = means[y] + rng.normal(size=(NUM_CLIENTS, max_samples, FEATURES))
        is_real = (np.arange(max_samples) < counts[:, None]).astype(np.float64)
        return ClientSamples(np.concatenate([x, np.ones((NUM_CLIENTS, max_samples, 1))], axis=2), y, is_real)

    train, probe, test = (draw(n) for n in (sizes, np.full(NUM_CLIENTS, PROBE), np.full(NUM_CLIENTS, TEST)))
    label_distributions = [np.bincount(y[:n], minlength=CLASSES) / n for y, n in zip(train.y, sizes, strict=True)]
    labels_of_clusters = fcluster(linkage(pdist(label_distributions, "jensenshannon"), "average"), clusters, "maxclust")
    cluster = np.unique(labels_of_clusters, return_inverse=True)[1]
    ghz, ram_gb = rng.uniform(0.5, 3, NUM_CLIENTS), rng.choice([1.0, 2.0, 4.0, 8.0], NUM_CLIENTS)
    return Fleet(train, probe, test, ghz, ram_gb, sizes.astype(np.float64), cluster)


def probabilities(models: Floats, x: Floats) -> Floats:
    logits = x @ models
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    normalised: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return normalised


def mean_over(samples: ClientSamples, values: Floats | ClientSets) -> Floats:
    mean: Floats = (values * samples.is_real).sum(axis=-1) / samples.is_real.sum(axis=-1)
    return mean


def losses(models: Floats, samples: ClientSamples) -> Floats:
    true_probability = np.take_along_axis(probabilities(models, samples.x), samples.y[..., None], axis=-1)[..., 0]
    return mean_over(samples, -np.log(np.maximum(true_probability, 1e-12)))


def accuracies(models: Floats, samples: ClientSamples) -> Floats:
    return mean_over(samples, (samples.x @ models).argmax(axis=-1) == samples.y)


def train_one_epoch(models: Floats, samples: ClientSamples) -> Floats:
    """Trains one epoch of SGD for each client. A client without further samples keeps its model."""
    models = models.copy()
    for start in range(0, samples.x.shape[1], BATCH):
        batch = samples.select(slice(None), slice(start, start + BATCH))
        error = (probabilities(models, batch.x) - np.eye(CLASSES)[batch.y]) * batch.is_real[..., None]
        num_real = np.maximum(batch.is_real.sum(axis=1), 1)[:, None, None]
        models -= RATE * (batch.x.transpose(0, 2, 1) @ error) / num_real
    return models


@dataclass
class Training:
    """The models of the clusters, and what the server knows about the clients."""

    fleet: Fleet
    models: Floats = field(init=False)
    update_norms: Floats = field(init=False)
    loss_drops: Floats = field(init=False)
    waiting_rounds: Floats = field(init=False)
    num_selections: Indices = field(init=False)
    last_set_losses: Floats = field(init=False)  # reported by the last set of each cluster

    def __post_init__(self) -> None:
        self.models = np.zeros((len(self.fleet.members), FEATURES + 1, CLASSES))
        self.update_norms, self.loss_drops = (np.full((NUM_CLIENTS, HISTORY), np.nan) for _ in range(2))
        self.waiting_rounds, self.num_selections = np.ones(NUM_CLIENTS), np.zeros(NUM_CLIENTS, dtype=np.int64)
        self.last_set_losses = np.full(len(self.models), np.nan)

    def features(self, uses_waiting: bool) -> Floats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # clients without a history have NaN
            past = [np.nanmean(self.update_norms, axis=1), np.nanmean(self.loss_drops, axis=1)]
        f = self.fleet
        return np.stack([f.ghz, f.ram_gb, f.sizes, *past, *([self.waiting_rounds] if uses_waiting else [])], axis=1)

    def cluster_losses(self) -> Floats:
        return self.fleet.mean_weights @ losses(self.models[self.fleet.cluster], self.fleet.probe)

    def expected_loss_drop(self, k: int, sets: ClientSets) -> Floats:
        """Returns the relative drop of the cluster's loss that each of the sets would give."""
        members = self.fleet.members[k]
        alone = train_one_epoch(np.repeat(self.models[k][None], len(members), axis=0), self.fleet.train.select(members))
        before = float(losses(self.models[k], self.fleet.probe.select(members)).mean())
        means = [alone[s[members]].mean(axis=0) for s in sets]
        after: Floats = np.array([losses(w, self.fleet.probe.select(members)).mean() for w in means])
        return 1 - after / before

    def run_round(self, chosen: Sequence[Indices], reward_source: RewardSource) -> Floats:
        """Trains a round, and returns the relative drop of each cluster's loss.

        The loss is that of all members, of the clients that trained, or of the training reports of two successive sets.
        """
        clients = np.concatenate(chosen)
        start, probe = self.models[self.fleet.cluster[clients]], self.fleet.probe.select(clients)
        before, own = self.cluster_losses(), losses(start, probe)
        ends = train_one_epoch(start, self.fleet.train.select(clients))
        for table, new in (
            (self.update_norms, np.linalg.norm((ends - start).reshape(len(clients), -1), axis=1)),
            (self.loss_drops, own - losses(ends, probe)),
        ):
            table[clients] = np.concatenate([table[clients, 1:], new[:, None]], axis=1)
        is_member = np.arange(len(chosen))[:, None] == self.fleet.cluster[clients]
        mean_weights = is_member / is_member.sum(axis=1, keepdims=True)
        self.models = np.einsum("ks,sfc->kfc", mean_weights, ends)
        self.waiting_rounds += 1
        self.waiting_rounds[clients] = 1
        self.num_selections[clients] += 1
        after = self.cluster_losses()
        if reward_source == "cohort":
            before, after = mean_weights @ own, mean_weights @ losses(self.models[self.fleet.cluster[clients]], probe)
        if reward_source == "set to set":
            after = (
                mean_weights @ (own + losses(ends, probe)) / 2
            )  # approximates the loss that is reported during an epoch
            before, self.last_set_losses = np.where(np.isnan(self.last_set_losses), after, self.last_set_losses), after
        return 1 - after / before


class RawRewards(SetBandit):
    """A bandit with the unchanged rewards."""

    def targets(self) -> Floats:
        return self.rewards_


class DetrendedRewards(SetBandit):
    """A bandit with rewards minus the mean of up to five before, because drops of the loss shrink during training."""

    def targets(self) -> Floats:
        r = self.rewards_
        detrended = np.array([r[i] - (r[max(0, i - HISTORY) : i].mean() if i else r[i]) for i in range(len(r))])
        return self.sigma * detrended / (detrended.std() or 1.0) if len(detrended) else detrended


Rule = Callable[[ClientSets, Training, int], int]


@dataclass(frozen=True)
class Arm:
    """A way to select clients: a bandit, or a rule."""

    bandit: Callable[[], SetBandit] | None = None
    rule: Rule = lambda sets, training, k: 0
    uses_seconds: bool = True
    uses_waiting_feature: bool = False
    reward_source: RewardSource = "all members"
    quantile: float = 0.5  # of the clients' costs, which the budget allows at least


def slowest_s(costs_s: Floats, sets: ClientSets) -> Floats:
    longest: Floats = np.where(sets, costs_s, 0.0).max(axis=1)
    return longest


def longest_waiting(sets: ClientSets, training: Training, k: int) -> int:
    return int(np.argmax(sets @ training.waiting_rounds))


def largest_drop(sets: ClientSets, training: Training, k: int) -> int:
    return int(np.argmax(training.expected_loss_drop(k, sets)))


def per_second(sets: ClientSets, training: Training, k: int) -> int:
    return int(np.argmax(training.expected_loss_drop(k, sets) / slowest_s(training.fleet.costs_s, sets)))


FULL_HISTORY: dict[str, Any] = {"window_rounds": 200, "waiting_bonus": 0.0}
ARMS: dict[str, Arm] = {
    "random sets": Arm(),
    "longest waiting": Arm(rule=longest_waiting),
    "oracle: drop": Arm(rule=largest_drop),
    "oracle: drop / s": Arm(rule=per_second),
    "as printed": Arm(partial(SetBandit, rho=2.0, noise=1.0, beta_scale=1.0, as_published=True, **FULL_HISTORY)),
    "energy kernel, exact": Arm(partial(RawRewards, beta_scale=1.0, **FULL_HISTORY)),
    "+ standardised": Arm(partial(SetBandit, beta_scale=1.0, **FULL_HISTORY)),
    "+ beta x 0.2": Arm(partial(SetBandit, **FULL_HISTORY)),
    "+ window of 8": Arm(partial(SetBandit, waiting_bonus=0.0)),
    "+ waiting = default": Arm(SetBandit),
    "default, beta x 1": Arm(partial(SetBandit, beta_scale=1.0)),
    "default, beta x 0": Arm(partial(SetBandit, beta_scale=0.0)),
    "default, window 200": Arm(partial(SetBandit, window_rounds=200)),
    "default, 200 candidates": Arm(partial(SetBandit, num_candidate_sets=200)),
    "default, not per second": Arm(SetBandit, uses_seconds=False),
    "default, cohort only": Arm(SetBandit, reward_source="cohort"),
    "default, set to set": Arm(SetBandit, reward_source="set to set"),
    "set to set, no waiting": Arm(partial(SetBandit, waiting_bonus=0.0), reward_source="set to set"),
    "default, de-trended": Arm(DetrendedRewards),
    "de-trended, no waiting": Arm(partial(DetrendedRewards, **FULL_HISTORY)),
    "waiting as a feature": Arm(partial(SetBandit, waiting_bonus=0.0), uses_waiting_feature=True),
    "random, all may fit": Arm(quantile=1.0),
    "longest waiting, all may fit": Arm(rule=longest_waiting, quantile=1.0),
    "default, all may fit": Arm(SetBandit, quantile=1.0),
}


def run(fleet: Fleet, arm: Arm, seed: int, budget_fraction: float) -> dict[str, Any]:
    training = Training(fleet)
    bandits = [arm.bandit() if arm.bandit else None for _ in fleet.members]
    inside = [fleet.cluster == k for k in range(len(fleet.members))]
    budgets = [time_budget(fleet.costs_s[m], budget_fraction, arm.quantile) for m in fleet.members]
    clock_s, accuracy = np.zeros((ROUNDS, len(fleet.members))), np.zeros((ROUNDS, NUM_CLIENTS))
    for t in range(ROUNDS):
        x = standardised_contexts(training.features(arm.uses_waiting_feature))
        chosen = []
        for k, bandit in enumerate(bandits):
            seed_of_set = derive_seed(seed, t, k)
            if bandit:
                chosen.append(
                    bandit.choose(x, fleet.costs_s, inside[k], budgets[k], seed_of_set, training.waiting_rounds)
                )
            else:
                sets = candidate_sets(fleet.costs_s, inside[k], budgets[k], seed_of_set)
                chosen.append(np.flatnonzero(sets[arm.rule(sets, training, k)]))
        drop = training.run_round(chosen, arm.reward_source)
        last_s = np.array([fleet.costs_s[clients].max() for clients in chosen])
        for clients, bandit, reward in zip(chosen, bandits, drop / last_s if arm.uses_seconds else drop, strict=True):
            if bandit:
                bandit.learn(x[clients], float(reward))
        clock_s[t] = clock_s[t - 1] + last_s if t else last_s
        accuracy[t] = accuracies(training.models[fleet.cluster], fleet.test)
    return {"clock_s": clock_s, "accuracy": accuracy, "often": training.num_selections, "cluster": fleet.cluster}


def compare_to_random(result: dict[str, Any], random: dict[str, Any]) -> dict[str, float]:
    half_s = random["clock_s"][ROUNDS // 2 - 1]
    last = np.maximum((result["clock_s"] <= half_s * (1 + 1e-9)).sum(axis=0) - 1, 0)
    return {
        "at_end": float(result["accuracy"][-5:].mean()),
        "over_rounds": float(result["accuracy"].mean()),
        "at_equal_time": float(result["accuracy"][last[result["cluster"]], np.arange(NUM_CLIENTS)].mean()),
        "time": float(result["clock_s"][-1].sum() / random["clock_s"][-1].sum()),
        "clients": float(result["often"].sum() / ROUNDS),
        "never": float((result["often"] == 0).mean()),
    }


def measure(clusters: int, seed: int, budget_fraction: float, names: Sequence[str]) -> list[dict[str, Any]]:
    fleet = make_fleet(seed, clusters)
    runs = {name: run(fleet, ARMS[name], seed, budget_fraction) for name in names}
    return [
        {"clusters": clusters, "seed": seed, "arm": name, **compare_to_random(result, runs["random sets"])}
        for name, result in runs.items()
    ]


def format_tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for clusters in dict.fromkeys(r["clusters"] for r in rows):
        table = [r for r in rows if r["clusters"] == clusters]
        random = {r["seed"]: r for r in table if r["arm"] == "random sets"}
        random_accuracy = np.mean([r["at_end"] for r in random.values()])
        lines += [f"\n{clusters} clusters, {len(random)} seeds, random sets {random_accuracy:.3f} at the end", ""]
        lines += [
            "| arm | at the end | over rounds | at equal time | time | clients per round | never |",
            "|" + "---|" * 7,
        ]
        for arm in dict.fromkeys(r["arm"] for r in table):
            own = [r for r in table if r["arm"] == arm]
            cells = []
            for name in ("at_end", "over_rounds", "at_equal_time"):
                gains = np.array([r[name] - random[r["seed"]][name] for r in own])
                error = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else np.nan
                cells.append(f"{gains.mean():+.4f} ± {error:.4f}")
            time, clients, never = (np.mean([r[name] for r in own]) for name in ("time", "clients", "never"))
            lines.append(f"| {arm} | {' | '.join(cells)} | {time:.2f} | {clients:.1f} | {never:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clusters",
        nargs="+",
        type=harness.parse_positive,
        default=[4, 10, 15],
        help="Numbers of clusters. Default: 4 10 15.",
    )
    parser.add_argument("--seeds", type=harness.parse_positive, default=8, help="Number of seeds. Default: 8.")
    parser.add_argument("--first-seed", type=int, default=0, help="First seed. Default: 0.")
    parser.add_argument(
        "--budget-fraction",
        type=float,
        default=0.16,
        help="Fraction of a cluster's total cost that a round may take. Default: 0.16.",
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="Arms to run. Default: all.")
    tiny = {"clusters": [4], "seeds": 1, "arms": ["oracle: drop", "as printed"]}
    options, run = harness.begin(parser, "bandit.json", tiny)
    names = list(dict.fromkeys(["random sets", *options.arms]))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with threadpool_limits(1):
        rows = [
            row for k in options.clusters for seed in seeds for row in measure(k, seed, options.budget_fraction, names)
        ]
    run.write(rows=rows)
    print("\n".join(format_tables(rows)))


if __name__ == "__main__":
    harness.call(main)
