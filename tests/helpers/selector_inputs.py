"""Inputs for tests of selectors, and how often a selector takes each client."""

import numpy as np

L = 12


def frozen(values, dtype=float):
    """An array that raises if anybody writes to it: inputs are never modified."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array


RNG = np.random.default_rng(5)


SIZES = frozen(RNG.integers(1, 50, L))


LABELS = frozen([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3], int)


GRADIENTS = frozen(RNG.normal(size=(L, 4)))


FACTOR = RNG.normal(size=(L, 3))


SIGMA = frozen(FACTOR @ FACTOR.T + 0.1 * np.eye(L))


SHARE = frozen(SIZES / SIZES.sum())


ONES = frozen(np.ones(L))


LOSSES = frozen(np.where(np.arange(L) % 3, RNG.uniform(size=L), np.nan))


def frequencies(select, runs, clients=L):
    often = np.zeros(clients)
    for seed in range(runs):
        often[select(seed)] += 1
    return often / runs
