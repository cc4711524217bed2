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
from shoal.types import Samples

_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class ShiftTarget:
    """The rows to shift, in place."""

    samples: Samples
    client_of_sample: Tensor  # the position of the client that holds each row
    first_test_sample: int  # test rows come last
    num_clients: int
    num_classes: int
    seed: int

    def rng(self, term: Term) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, "shift", term.name))

    def choose_clients(self, term: Term) -> NDArray[np.bool_]:
        """A share of the clients."""
        mask = np.zeros(self.num_clients, dtype=bool)
        mask[self.rng(term).permutation(self.num_clients)[: round(term.parse_fraction() * self.num_clients)]] = True
        return mask

    def samples_of(self, clients: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(clients)[self.client_of_sample].nonzero().squeeze(1)


class ShiftEffect(NamedTuple):
    """What was done to each client ("" for nothing), and the planted group if there are groups."""

    descriptions: list[str]
    planted_groups: NDArray[np.int64] | None = None


def rotate(target: ShiftTarget, term: Term) -> ShiftEffect:
    angles = term.parse_numbers()
    x = target.samples.x
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise term.error(f"only square images can be turned, and rows have shape {tuple(x.shape[1:])}")
    angle_of_client = np.empty(target.num_clients, dtype=np.int64)
    angle_of_client[target.rng(term).permutation(target.num_clients)] = np.arange(target.num_clients) % len(angles)
    for i, angle in enumerate(angles):
        if angle % 360:
            rows = target.samples_of(angle_of_client == i)
            x[rows] = _rotate_images(x[rows], angle)
    names = [f"rotate {angle:g}" if angle % 360 else "" for angle in angles]
    return ShiftEffect([names[i] for i in angle_of_client], angle_of_client)


def _rotate_images(x: Tensor, angle: float) -> Tensor:
    """Counter-clockwise. Multiples of 90 move pixels; other angles interpolate, with the border held."""
    if angle % 90 == 0:
        return x.rot90(int(angle // 90), dims=(2, 3))
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    frame = x.new_tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(x), 2, 3)
    grid = functional.affine_grid(frame, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


def invert(target: ShiftTarget, term: Term) -> ShiftEffect:
    chosen = target.choose_clients(term)
    target.samples.x[target.samples_of(chosen)] *= -1
    return ShiftEffect(["invert" if c else "" for c in chosen], chosen.astype(np.int64))


def add_noise(target: ShiftTarget, term: Term) -> ShiftEffect:
    """From none for the first client to the full SIGMA for the last."""
    (sigma,) = term.parse_named_numbers("SIGMA")
    term.require_positive("SIGMA", sigma)
    sigmas = torch.linspace(0, sigma, target.num_clients) if target.num_clients > 1 else torch.tensor([sigma])
    noise_generator = generator(derive_seed(target.seed, "shift", term.name))
    shape = (-1, *[1] * (target.samples.x.ndim - 1))
    for start in range(0, len(target.client_of_sample), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        x = target.samples.x[block]
        x += torch.randn(x.shape, generator=noise_generator) * sigmas[target.client_of_sample[block]].view(shape)
    return ShiftEffect([f"noise {s:.3g}" if s else "" for s in sigmas.tolist()])


def mislabel(target: ShiftTarget, term: Term) -> ShiftEffect:
    """Training and validation labels only: what a client is tested on stays true."""
    rng = target.rng(term)
    rates = rng.uniform(0, term.parse_fraction(), target.num_clients)
    y, client = target.samples.y[: target.first_test_sample], target.client_of_sample[: target.first_test_sample]
    wrong = torch.from_numpy(rng.random(len(y))) < torch.from_numpy(rates)[client]
    step = torch.from_numpy(rng.integers(1, target.num_classes, len(y)))
    y[wrong] = (y[wrong] + step[wrong]) % target.num_classes
    return ShiftEffect([f"mislabel {rate:.3g}" if rate else "" for rate in rates.tolist()])


def permute(target: ShiftTarget, term: Term) -> ShiftEffect:
    """One cycle through all classes, so that no label keeps its meaning."""
    chosen = target.choose_clients(term)
    cycle = np.random.default_rng(derive_seed(target.seed, "shift", "cycle")).permutation(target.num_classes)
    meaning = torch.empty(target.num_classes, dtype=torch.int64)
    meaning[torch.from_numpy(cycle)] = torch.from_numpy(np.roll(cycle, 1))
    rows = target.samples_of(chosen)
    target.samples.y[rows] = meaning[target.samples.y[rows]]
    return ShiftEffect(["permute" if c else "" for c in chosen], chosen.astype(np.int64))


class Shift(NamedTuple):
    apply: Callable[[ShiftTarget, Term], ShiftEffect]
    example: str


SHIFTS = {
    "rotate": Shift(rotate, "rotate:0,90,180,270"),
    "invert": Shift(invert, "invert:0.5"),
    "noise": Shift(add_noise, "noise:0.5"),
    "mislabel": Shift(mislabel, "mislabel:0.3"),
    "permute": Shift(permute, "permute:0.5"),
}
