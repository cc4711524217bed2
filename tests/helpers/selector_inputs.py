"""Inputs for tests of selectors, and the frequency with which a selector takes each client."""

import numpy as np

NUM_CLIENTS = 12


def read_only(values, dtype=float):
    """Returns an array that raises when it is written to, because a selector must not modify its inputs."""
    array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array


RNG = np.random.default_rng(5)


SIZES = read_only(RNG.integers(1, 50, NUM_CLIENTS))


LABELS = read_only([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3], int)


GRADIENTS = read_only(RNG.normal(size=(NUM_CLIENTS, 4)))


FACTOR = RNG.normal(size=(NUM_CLIENTS, 3))


SIGMA = read_only(FACTOR @ FACTOR.T + 0.1 * np.eye(NUM_CLIENTS))


SAMPLE_FRACTIONS = read_only(SIZES / SIZES.sum())


ONES = read_only(np.ones(NUM_CLIENTS))


LOSSES = read_only(np.where(np.arange(NUM_CLIENTS) % 3, RNG.uniform(size=NUM_CLIENTS), np.nan))


def frequencies(select, runs, clients=NUM_CLIENTS):
    counts = np.zeros(clients)
    for seed in range(runs):
        counts[select(seed)] += 1
    return counts / runs
