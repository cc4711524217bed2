"""Data transformations that make clients differ: rotated or inverted images, noise, wrong or permuted labels."""

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
    """The samples of a federation, which a shift changes in place."""

    samples: Samples
    client_of_sample: Tensor  # index of the client of each sample
    first_test_sample: int  # index; test samples come last
    num_clients: int
    num_classes: int
    seed: int

    def rng(self, term: Term) -> np.random.Generator:
        """Returns the random generator of a shift."""
        return np.random.default_rng(derive_seed(self.seed, "shift", term.name))

    def choose_clients(self, term: Term) -> NDArray[np.bool_]:
        """Returns a mask of a random share of the clients, as the term says."""
        mask = np.zeros(self.num_clients, dtype=bool)
        mask[self.rng(term).permutation(self.num_clients)[: round(term.parse_fraction() * self.num_clients)]] = True
        return mask

    def samples_of(self, clients: NDArray[np.bool_]) -> Tensor:
        """Returns the indices of the samples of these clients."""
        return torch.from_numpy(clients)[self.client_of_sample].nonzero().squeeze(1)


class ShiftEffect(NamedTuple):
    """A description of each client's shift ("" for none), and the planted groups if the shift forms groups."""

    descriptions: list[str]
    planted_groups: NDArray[np.int64] | None = None


def rotate(target: ShiftTarget, term: Term) -> ShiftEffect:
    """Rotates the images of each client by one of the angles. Every angle gets equally many clients."""
    angles = term.parse_numbers()
    x = target.samples.x
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise term.error(f"only square images can be rotated, and the samples have shape {tuple(x.shape[1:])}")
    angle_of_client = np.empty(target.num_clients, dtype=np.int64)
    angle_of_client[target.rng(term).permutation(target.num_clients)] = np.arange(target.num_clients) % len(angles)
    for i, angle in enumerate(angles):
        if angle % 360:
            indices = target.samples_of(angle_of_client == i)
            x[indices] = _rotate_images(x[indices], angle)
    names = [f"rotate {angle:g}" if angle % 360 else "" for angle in angles]
    return ShiftEffect([names[i] for i in angle_of_client], angle_of_client)


def _rotate_images(x: Tensor, angle: float) -> Tensor:
    """Rotates counter-clockwise. Multiples of 90 move pixels. Other angles interpolate and repeat the border."""
    if angle % 90 == 0:
        return x.rot90(int(angle // 90), dims=(2, 3))
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    frame = x.new_tensor([[c, -s, 0.0], [s, c, 0.0]]).expand(len(x), 2, 3)
    grid = functional.affine_grid(frame, list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


def invert(target: ShiftTarget, term: Term) -> ShiftEffect:
    """Negates the features of a share of the clients."""
    is_chosen = target.choose_clients(term)
    target.samples.x[target.samples_of(is_chosen)] *= -1
    return ShiftEffect(["invert" if c else "" for c in is_chosen], is_chosen.astype(np.int64))


def add_noise(target: ShiftTarget, term: Term) -> ShiftEffect:
    """Adds Gaussian noise, with a standard deviation from 0 for the first client to SIGMA for the last."""
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
    """Makes training and validation labels wrong, at a random rate per client. Test labels stay correct."""
    rng = target.rng(term)
    rates = rng.uniform(0, term.parse_fraction(), target.num_clients)
    y, client = target.samples.y[: target.first_test_sample], target.client_of_sample[: target.first_test_sample]
    is_wrong = torch.from_numpy(rng.random(len(y))) < torch.from_numpy(rates)[client]
    step = torch.from_numpy(rng.integers(1, target.num_classes, len(y)))
    y[is_wrong] = (y[is_wrong] + step[is_wrong]) % target.num_classes
    return ShiftEffect([f"mislabel {rate:.3g}" if rate else "" for rate in rates.tolist()])


def permute(target: ShiftTarget, term: Term) -> ShiftEffect:
    """Permutes the labels of a share of the clients, by one cycle of all classes, so that every label changes."""
    is_chosen = target.choose_clients(term)
    cycle = np.random.default_rng(derive_seed(target.seed, "shift", "cycle")).permutation(target.num_classes)
    new_label = torch.empty(target.num_classes, dtype=torch.int64)
    new_label[torch.from_numpy(cycle)] = torch.from_numpy(np.roll(cycle, 1))
    indices = target.samples_of(is_chosen)
    target.samples.y[indices] = new_label[target.samples.y[indices]]
    return ShiftEffect(["permute" if c else "" for c in is_chosen], is_chosen.astype(np.int64))


class Shift(NamedTuple):
    """A data transformation, and an example of its text."""

    apply: Callable[[ShiftTarget, Term], ShiftEffect]
    example: str


SHIFTS = {
    "rotate": Shift(rotate, "rotate:0,90,180,270"),
    "invert": Shift(invert, "invert:0.5"),
    "noise": Shift(add_noise, "noise:0.5"),
    "mislabel": Shift(mislabel, "mislabel:0.3"),
    "permute": Shift(permute, "permute:0.5"),
}
