"""Does a bandit choose better sets of clients than chance, and if not, why: FedEPC's selector in a small simulation.

Fifty clients with Dirichlet(0.1) labels over ten Gaussian classes, clustered by labels; each cluster trains its own
softmax regression by federated averaging, one epoch a round, with clients that fit the cluster's time budget. A client
costs its rows / its clock rate; a round lasts as long as its slowest. All arms of a seed see the same fleet, the same
candidates and the same order of rows. Reported as differences to random feasible sets, with standard errors over seeds:
accuracy on the clients' own test rows at the end (mean of the last five rounds), over all rounds, and at equal time,
which is when random sets are half way. The oracles try all candidates first. The defaults were chosen on other fleets
than those of `--first 100 --seeds 12`. Writes `results/bandit.json`.
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
from shoal.selectors.bandit import SetBandit, Sets, budget, candidates, contexts
from shoal.selectors.sampling import Floats, Indices

Measured = Literal["by all", "by those who trained", "set to set"]
CLIENTS, CLASSES, FEATURES, BATCH, PROBE, TEST, HISTORY, ROUNDS, RATE = 50, 10, 16, 20, 60, 100, 5, 40, 0.1


@dataclass(frozen=True)
class Rows:
    """Of every client: x [clients, rows, features and a 1], y, and which rows are real."""

    x: Floats
    y: Indices
    real: Floats

    def of(self, who: Indices | slice, part: slice = slice(None)) -> Rows:
        return Rows(self.x[who][:, part], self.y[who][:, part], self.real[who][:, part])


@dataclass(frozen=True)
class Fleet:
    train: Rows
    probe: Rows
    test: Rows
    ghz: Floats
    ram_gb: Floats
    sizes: Floats
    cluster: Indices
    share: Floats = field(init=False)  # clusters by clients: each row the mean over its members
    members: list[Indices] = field(init=False)

    def __post_init__(self) -> None:
        inside = np.arange(self.cluster.max() + 1)[:, None] == self.cluster
        object.__setattr__(self, "share", inside / inside.sum(axis=1, keepdims=True))
        object.__setattr__(self, "members", [np.flatnonzero(row) for row in inside])

    @property
    def costs_s(self) -> Floats:
        return self.sizes / self.ghz


def fleet(seed: int, clusters: int, alpha: float = 0.1, separation: float = 0.6) -> Fleet:
    rng = np.random.default_rng(derive_seed(seed, "fleet"))
    labels = rng.dirichlet(np.full(CLASSES, alpha), CLIENTS)
    means = separation * rng.normal(size=(CLASSES, FEATURES))
    sizes = np.clip(np.exp(rng.normal(np.log(90), 0.6, CLIENTS)), 20, 300).astype(np.int64)

    def drawn(counts: Indices) -> Rows:
        most = int(-(-counts.max() // BATCH) * BATCH)
        y = np.stack([rng.choice(CLASSES, size=most, p=p) for p in labels])
        x = means[y] + rng.normal(size=(CLIENTS, most, FEATURES))
        real = (np.arange(most) < counts[:, None]).astype(np.float64)
        return Rows(np.concatenate([x, np.ones((CLIENTS, most, 1))], axis=2), y, real)

    train, probe, test = (drawn(n) for n in (sizes, np.full(CLIENTS, PROBE), np.full(CLIENTS, TEST)))
    seen = [np.bincount(y[:n], minlength=CLASSES) / n for y, n in zip(train.y, sizes, strict=True)]
    found = fcluster(linkage(pdist(seen, "jensenshannon"), "average"), clusters, "maxclust")
    cluster = np.unique(found, return_inverse=True)[1]
    ghz, ram_gb = rng.uniform(0.5, 3, CLIENTS), rng.choice([1.0, 2.0, 4.0, 8.0], CLIENTS)
    return Fleet(train, probe, test, ghz, ram_gb, sizes.astype(np.float64), cluster)


def probabilities(models: Floats, x: Floats) -> Floats:
    logits = x @ models
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found: Floats = raised / raised.sum(axis=-1, keepdims=True)
    return found


def mean_over(rows: Rows, values: Floats | Sets) -> Floats:
    mean: Floats = (values * rows.real).sum(axis=-1) / rows.real.sum(axis=-1)
    return mean


def losses(models: Floats, rows: Rows) -> Floats:
    right = np.take_along_axis(probabilities(models, rows.x), rows.y[..., None], axis=-1)[..., 0]
    return mean_over(rows, -np.log(np.maximum(right, 1e-12)))


def accuracies(models: Floats, rows: Rows) -> Floats:
    return mean_over(rows, (rows.x @ models).argmax(axis=-1) == rows.y)


def trained(models: Floats, rows: Rows) -> Floats:
    """One epoch of SGD for each client; who has run out of rows rests."""
    models = models.copy()
    for start in range(0, rows.x.shape[1], BATCH):
        b = rows.of(slice(None), slice(start, start + BATCH))
        error = (probabilities(models, b.x) - np.eye(CLASSES)[b.y]) * b.real[..., None]
        models -= RATE * (b.x.transpose(0, 2, 1) @ error) / np.maximum(b.real.sum(axis=1), 1)[:, None, None]
    return models


@dataclass
class Training:
    """The clusters' models and what the server knows of the clients."""

    fleet: Fleet
    models: Floats = field(init=False)
    norms: Floats = field(init=False)
    drops: Floats = field(init=False)
    waited: Floats = field(init=False)
    often: Indices = field(init=False)
    told: Floats = field(init=False)  # by the last set of each cluster

    def __post_init__(self) -> None:
        self.models = np.zeros((len(self.fleet.members), FEATURES + 1, CLASSES))
        self.norms, self.drops = (np.full((CLIENTS, HISTORY), np.nan) for _ in range(2))
        self.waited, self.often = np.ones(CLIENTS), np.zeros(CLIENTS, dtype=np.int64)
        self.told = np.full(len(self.models), np.nan)

    def features(self, waiting: bool) -> Floats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # no history yet: NaN is what is meant
            past = [np.nanmean(self.norms, axis=1), np.nanmean(self.drops, axis=1)]
        f = self.fleet
        return np.stack([f.ghz, f.ram_gb, f.sizes, *past, *([self.waited] if waiting else [])], axis=1)

    def cluster_losses(self) -> Floats:
        return self.fleet.share @ losses(self.models[self.fleet.cluster], self.fleet.probe)

    def drop_of(self, k: int, sets: Sets) -> Floats:
        """By how much the cluster's loss would fall, relative to what it is, with each of the sets."""
        m = self.fleet.members[k]
        alone = trained(np.repeat(self.models[k][None], len(m), axis=0), self.fleet.train.of(m))
        before = float(losses(self.models[k], self.fleet.probe.of(m)).mean())
        means = [alone[s[m]].mean(axis=0) for s in sets]
        after: Floats = np.array([losses(w, self.fleet.probe.of(m)).mean() for w in means])
        return 1 - after / before

    def round(self, chosen: Sequence[Indices], measured: Measured) -> Floats:
        """Trains, and gives the relative drop of each cluster's loss: of all its members, of those who trained, or from
        what the set before them told in training to what they told."""
        who = np.concatenate(chosen)
        start, probe = self.models[self.fleet.cluster[who]], self.fleet.probe.of(who)
        before, own = self.cluster_losses(), losses(start, probe)
        ends = trained(start, self.fleet.train.of(who))
        for table, new in (
            (self.norms, np.linalg.norm((ends - start).reshape(len(who), -1), axis=1)),
            (self.drops, own - losses(ends, probe)),
        ):
            table[who] = np.concatenate([table[who, 1:], new[:, None]], axis=1)
        inside = np.arange(len(chosen))[:, None] == self.fleet.cluster[who]
        share = inside / inside.sum(axis=1, keepdims=True)
        self.models = np.einsum("ks,sfc->kfc", share, ends)
        self.waited += 1
        self.waited[who] = 1
        self.often[who] += 1
        after = self.cluster_losses()
        if measured == "by those who trained":
            before, after = share @ own, share @ losses(self.models[self.fleet.cluster[who]], probe)
        if measured == "set to set":
            after = share @ (own + losses(ends, probe)) / 2  # about what an epoch of training shows
            before, self.told = np.where(np.isnan(self.told), after, self.told), after
        return 1 - after / before


class Raw(SetBandit):
    """Rewards as they come."""

    def targets(self) -> Floats:
        return self.rewards_


class Detrended(SetBandit):
    """Rewards less the mean of up to five before: losses fall by less and less anyway."""

    def targets(self) -> Floats:
        r = self.rewards_
        rest = np.array([r[i] - (r[max(0, i - HISTORY) : i].mean() if i else r[i]) for i in range(len(r))])
        return self.sigma * rest / (rest.std() or 1.0) if len(rest) else rest


Rule = Callable[[Sets, Training, int], int]


@dataclass(frozen=True)
class Arm:
    bandit: Callable[[], SetBandit] | None = None
    rule: Rule = lambda sets, training, k: 0
    per_second: bool = True
    waiting_feature: bool = False
    measured: Measured = "by all"
    quantile: float = 0.5  # of the clients' costs that the budget allows at least


def slowest(costs_s: Floats, sets: Sets) -> Floats:
    longest: Floats = np.where(sets, costs_s, 0.0).max(axis=1)
    return longest


def longest_waiting(sets: Sets, training: Training, k: int) -> int:
    return int(np.argmax(sets @ training.waited))


def largest_drop(sets: Sets, training: Training, k: int) -> int:
    return int(np.argmax(training.drop_of(k, sets)))


def per_second(sets: Sets, training: Training, k: int) -> int:
    return int(np.argmax(training.drop_of(k, sets) / slowest(training.fleet.costs_s, sets)))


WHOLE: dict[str, Any] = {"window": 200, "patience": 0.0}
ARMS: dict[str, Arm] = {
    "random sets": Arm(),
    "longest waiting": Arm(rule=longest_waiting),
    "oracle: drop": Arm(rule=largest_drop),
    "oracle: drop / s": Arm(rule=per_second),
    "as printed": Arm(partial(SetBandit, rho=2.0, noise=1.0, beta_scale=1.0, literal=True, **WHOLE)),
    "energy kernel, exact": Arm(partial(Raw, beta_scale=1.0, **WHOLE)),
    "+ standardised": Arm(partial(SetBandit, beta_scale=1.0, **WHOLE)),
    "+ beta x 0.2": Arm(partial(SetBandit, **WHOLE)),
    "+ window of 8": Arm(partial(SetBandit, patience=0.0)),
    "+ waiting = default": Arm(SetBandit),
    "default, beta x 1": Arm(partial(SetBandit, beta_scale=1.0)),
    "default, beta x 0": Arm(partial(SetBandit, beta_scale=0.0)),
    "default, window 200": Arm(partial(SetBandit, window=200)),
    "default, 200 candidates": Arm(partial(SetBandit, count=200)),
    "default, not per second": Arm(SetBandit, per_second=False),
    "default, heard only": Arm(SetBandit, measured="by those who trained"),
    "default, set to set": Arm(SetBandit, measured="set to set"),
    "set to set, no waiting": Arm(partial(SetBandit, patience=0.0), measured="set to set"),
    "default, de-trended": Arm(Detrended),
    "de-trended, no waiting": Arm(partial(Detrended, **WHOLE)),
    "waiting as a feature": Arm(partial(SetBandit, patience=0.0), waiting_feature=True),
    "random, all may fit": Arm(quantile=1.0),
    "longest waiting, all may fit": Arm(rule=longest_waiting, quantile=1.0),
    "default, all may fit": Arm(SetBandit, quantile=1.0),
}


def run(f: Fleet, arm: Arm, seed: int, share: float) -> dict[str, Any]:
    training = Training(f)
    bandits = [arm.bandit() if arm.bandit else None for _ in f.members]
    inside = [f.cluster == k for k in range(len(f.members))]
    budgets = [budget(f.costs_s[m], share, arm.quantile) for m in f.members]
    clock_s, accuracy = np.zeros((ROUNDS, len(f.members))), np.zeros((ROUNDS, CLIENTS))
    for t in range(ROUNDS):
        x = contexts(training.features(arm.waiting_feature))
        chosen = []
        for k, bandit in enumerate(bandits):
            chance = derive_seed(seed, t, k)
            if bandit:
                chosen.append(bandit.choose(x, f.costs_s, inside[k], budgets[k], chance, training.waited))
            else:
                sets = candidates(f.costs_s, inside[k], budgets[k], chance)
                chosen.append(np.flatnonzero(sets[arm.rule(sets, training, k)]))
        drop = training.round(chosen, arm.measured)
        last_s = np.array([f.costs_s[who].max() for who in chosen])
        for who, bandit, reward in zip(chosen, bandits, drop / last_s if arm.per_second else drop, strict=True):
            if bandit:
                bandit.learn(x[who], float(reward))
        clock_s[t] = clock_s[t - 1] + last_s if t else last_s
        accuracy[t] = accuracies(training.models[f.cluster], f.test)
    return {"clock_s": clock_s, "accuracy": accuracy, "often": training.often, "cluster": f.cluster}


def figures(found: dict[str, Any], random: dict[str, Any]) -> dict[str, float]:
    half_s = random["clock_s"][ROUNDS // 2 - 1]
    last = np.maximum((found["clock_s"] <= half_s * (1 + 1e-9)).sum(axis=0) - 1, 0)
    return {
        "at_end": float(found["accuracy"][-5:].mean()),
        "over_rounds": float(found["accuracy"].mean()),
        "at_equal_time": float(found["accuracy"][last[found["cluster"]], np.arange(CLIENTS)].mean()),
        "time": float(found["clock_s"][-1].sum() / random["clock_s"][-1].sum()),
        "clients": float(found["often"].sum() / ROUNDS),
        "never": float((found["often"] == 0).mean()),
    }


def measured(clusters: int, seed: int, share: float, names: Sequence[str]) -> list[dict[str, Any]]:
    f = fleet(seed, clusters)
    runs = {name: run(f, ARMS[name], seed, share) for name in names}
    return [
        {"clusters": clusters, "seed": seed, "arm": name, **figures(found, runs["random sets"])}
        for name, found in runs.items()
    ]


def said(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for clusters in dict.fromkeys(r["clusters"] for r in rows):
        table = [r for r in rows if r["clusters"] == clusters]
        random = {r["seed"]: r for r in table if r["arm"] == "random sets"}
        level = np.mean([r["at_end"] for r in random.values()])
        lines += [f"\n{clusters} clusters, {len(random)} seeds, random sets {level:.3f} at the end", ""]
        lines += [
            "| arm | at the end | over rounds | at equal time | time | clients a round | never |",
            "|" + "---|" * 7,
        ]
        for arm in dict.fromkeys(r["arm"] for r in table):
            own = [r for r in table if r["arm"] == arm]
            cells = []
            for name in ("at_end", "over_rounds", "at_equal_time"):
                rest = np.array([r[name] - random[r["seed"]][name] for r in own])
                error = rest.std(ddof=1) / np.sqrt(len(rest)) if len(rest) > 1 else np.nan
                cells.append(f"{rest.mean():+.4f} ± {error:.4f}")
            time, clients, never = (np.mean([r[name] for r in own]) for name in ("time", "clients", "never"))
            lines.append(f"| {arm} | {' | '.join(cells)} | {time:.2f} | {clients:.1f} | {never:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", type=harness.positive, default=[4, 10, 15])
    parser.add_argument("--seeds", type=harness.positive, default=8)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--share", type=float, default=0.16, help="of a cluster's total cost that a round may take")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    tiny = {"clusters": [4], "seeds": 1, "arms": ["oracle: drop", "as printed"]}
    options, run = harness.begin(parser, "bandit.json", tiny)
    names = list(dict.fromkeys(["random sets", *options.arms]))
    seeds = range(options.first, options.first + options.seeds)
    with threadpool_limits(1):
        found = [row for k in options.clusters for seed in seeds for row in measured(k, seed, options.share, names)]
    run.write(rows=found)
    print("\n".join(said(found)))


if __name__ == "__main__":
    harness.call(main)
