"""What makes clients differ beyond which rows they hold: turned images, noise, wrong or other labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shoal.data.partition_grammar import Term
from shoal.rng import derive_seed, generator
from shoal.types import Examples

_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Target:
    """The rows to shift, in place."""

    rows: Examples
    client: Tensor  # the position of the client that holds each row
    first_test_row: int  # test rows come last
    clients: int
    classes: int
    seed: int

    def rng(self, term: Term) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, "shift", term.name))

    def chosen(self, term: Term) -> NDArray[np.bool_]:
        """A share of the clients."""
        mask = np.zeros(self.clients, dtype=bool)
        mask[self.rng(term).permutation(self.clients)[: round(term.share() * self.clients)]] = True
        return mask

    def rows_of(self, clients: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(clients)[self.client].nonzero().squeeze(1)


class Effect(NamedTuple):
    """What was done to each client ("" for nothing), and the planted group if there are groups."""

    done: list[str]
    groups: NDArray[np.int64] | None = None


def rotate(target: Target, term: Term) -> Effect:
    angles = term.numbers()
    x = target.rows.x
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise term.wrong(f"only square images can be turned, and rows have shape {tuple(x.shape[1:])}")
    turn = np.empty(target.clients, dtype=np.int64)
    turn[target.rng(term).permutation(target.clients)] = np.arange(target.clients) % len(angles)
    for i, angle in enumerate(angles):
        if angle % 360:
            rows = target.rows_of(turn == i)
            x[rows] = _turned(x[rows], angle)
    names = [f"rotate {angle:g}" if angle % 360 else "" for angle in angles]
    return Effect([names[i] for i in turn], turn)


def _turned(x: Tensor, angle: float) -> Tensor:
    """Counter-clockwise. Multiples of 90 move pixels; other angles interpolate, with the border held."""
    if angle % 90 == 0:
        return x.rot90(int(angle // 90), dims=(2, 3))
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    frame = x.new_tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(x), 2, 3)
    grid = functional.affine_grid(frame, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


def invert(target: Target, term: Term) -> Effect:
    chosen = target.chosen(term)
    target.rows.x[target.rows_of(chosen)] *= -1
    return Effect(["invert" if c else "" for c in chosen], chosen.astype(np.int64))


def noise(target: Target, term: Term) -> Effect:
    """From none for the first client to the full SIGMA for the last."""
    (sigma,) = term.exactly("SIGMA")
    term.positive("SIGMA", sigma)
    sigmas = torch.linspace(0, sigma, target.clients) if target.clients > 1 else torch.tensor([sigma])
    chance = generator(derive_seed(target.seed, "shift", term.name))
    shape = (-1, *[1] * (target.rows.x.ndim - 1))
    for start in range(0, len(target.client), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        x = target.rows.x[block]
        x += torch.randn(x.shape, generator=chance) * sigmas[target.client[block]].view(shape)
    return Effect([f"noise {s:.3g}" if s else "" for s in sigmas.tolist()])


def mislabel(target: Target, term: Term) -> Effect:
    """Training and validation labels only: what a client is tested on stays true."""
    rng = target.rng(term)
    rates = rng.uniform(0, term.share(), target.clients)
    y, client = target.rows.y[: target.first_test_row], target.client[: target.first_test_row]
    wrong = torch.from_numpy(rng.random(len(y))) < torch.from_numpy(rates)[client]
    step = torch.from_numpy(rng.integers(1, target.classes, len(y)))
    y[wrong] = (y[wrong] + step[wrong]) % target.classes
    return Effect([f"mislabel {rate:.3g}" if rate else "" for rate in rates.tolist()])


def permute(target: Target, term: Term) -> Effect:
    """One cycle through all classes, so that no label keeps its meaning."""
    chosen = target.chosen(term)
    cycle = np.random.default_rng(derive_seed(target.seed, "shift", "cycle")).permutation(target.classes)
    meaning = torch.empty(target.classes, dtype=torch.int64)
    meaning[torch.from_numpy(cycle)] = torch.from_numpy(np.roll(cycle, 1))
    rows = target.rows_of(chosen)
    target.rows.y[rows] = meaning[target.rows.y[rows]]
    return Effect(["permute" if c else "" for c in chosen], chosen.astype(np.int64))


class Shift(NamedTuple):
    apply: Callable[[Target, Term], Effect]
    example: str


SHIFTS = {
    "rotate": Shift(rotate, "rotate:0,90,180,270"),
    "invert": Shift(invert, "invert:0.5"),
    "noise": Shift(noise, "noise:0.5"),
    "mislabel": Shift(mislabel, "mislabel:0.3"),
    "permute": Shift(permute, "permute:0.5"),
}
