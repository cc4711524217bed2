"""Generated windows of wearable motion sensors, in which every person moves and wears the sensor differently.

A window has six channels: an accelerometer in g and a gyroscope in rad/s, with three axes each. An activity is a
posture, which gives the direction of gravity, and a movement, which is a sum of harmonics and is never quite regular.
A person has a tempo, a gain, an orientation of the sensor (a rotation of its axes), an offset of each channel, and
habits, which are how often each activity occurs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.dataset import Dataset
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import Samples

Floats = NDArray[np.float64]

NUM_PEOPLE, NUM_CHANNELS, LENGTH = 30, 6, 64
RATE_HZ = 20.0
DEFAULT_ACTIVITIES = 6
_MIN_WINDOWS, _MAX_WINDOWS = 120, 240  # training windows of a person
_TEST_FRACTION = 0.2
_NUM_HARMONICS = 4
_TEMPO_SPREAD, _STRENGTH_SPREAD = 0.03, 0.15  # of the windows of a person, as standard deviations of logarithms
_SENSOR_NOISE = 0.2  # standard deviation, in g and in rad/s
_IRREGULARITY = 0.35  # standard deviation of random motion, as a fraction of the strength of the movement
_RESOLUTION = 256  # steps of the sensor per g and per rad/s; rounding hides that sines differ in the last bit


class Activity(NamedTuple):
    """A movement: how fast and how strong it is, and how far the body leans from upright."""

    name: str
    base_hz: float
    acceleration_g: float
    rotation_rad_s: float
    lean_degrees: float


ACTIVITIES = (
    Activity("walking", 1.8, 0.45, 3.0, 5),
    Activity("upstairs", 1.5, 0.45, 3.0, 15),
    Activity("downstairs", 2.1, 0.60, 3.3, 5),
    Activity("running", 2.7, 1.20, 4.5, 15),
    Activity("cycling", 1.3, 0.25, 2.5, 35),
    Activity("standing", 0.4, 0.03, 0.1, 0),
    Activity("sitting", 0.3, 0.02, 0.1, 30),
    Activity("lying", 0.3, 0.02, 0.1, 90),
    Activity("rowing", 0.6, 0.60, 2.0, 25),
    Activity("rope skipping", 2.3, 1.50, 2.5, 5),
    Activity("sweeping", 0.9, 0.35, 2.5, 30),
    Activity("jumping jacks", 1.1, 1.00, 4.0, 0),
)


def parse_sensors(name: str, seed: int) -> Dataset:
    """Reads `sensors`, or with a number of activities `sensors:ACTIVITIES`, and draws the data set."""
    _, separator, text = name.partition(":")
    activities = DEFAULT_ACTIVITIES if not separator else int(text) if text.isascii() and text.isdigit() else 0
    if not DEFAULT_ACTIVITIES <= activities <= len(ACTIVITIES):
        raise UserError(
            f"data {name!r} is not sensors or sensors:ACTIVITIES, with {DEFAULT_ACTIVITIES} to {len(ACTIVITIES)} "
            "activities, as in sensors:8."
        )
    return draw_sensors(seed, name=name, activities=activities)


def draw_sensors(seed: int, *, name: str = "sensors", activities: int = DEFAULT_ACTIVITIES) -> Dataset:
    """Draws windows of 30 people.

    Parameters
    ----------
    seed : int
        Seed of the draws: movements, people and windows.
    name : str
        Name of the data set.
    activities : int
        Number of activities, which are the classes.

    Returns
    -------
    Dataset
        The data set, in which every training sample has its person as owner. The test part has windows of all people.
    """
    rng = np.random.default_rng(derive_seed(seed, "sensors"))
    movements = _Movements(ACTIVITIES[:activities], rng)
    people = _People(activities, rng)
    sizes = rng.integers(_MIN_WINDOWS, _MAX_WINDOWS, NUM_PEOPLE, endpoint=True)
    owner = np.repeat(np.arange(NUM_PEOPLE), sizes)
    test_person = np.repeat(np.arange(NUM_PEOPLE), np.rint(sizes * _TEST_FRACTION).astype(np.int64))
    names = [f"p{k:02d}" for k in range(NUM_PEOPLE)]
    return Dataset(
        name=name,
        train=_draw_windows(movements, people, owner, rng),
        test=_draw_windows(movements, people, test_person, rng),
        classes=tuple(activity.name for activity in ACTIVITIES[:activities]),
        owner=tuple(names[k] for k in owner.tolist()),
    )


class _Movements:
    """The posture and the harmonics of each activity, before a person performs it."""

    def __init__(self, activities: tuple[Activity, ...], rng: np.random.Generator) -> None:
        table = np.array([activity[1:] for activity in activities])
        self.base_hz = table[:, 0]
        self.phase = rng.uniform(0, 2 * np.pi, (len(table), NUM_CHANNELS, _NUM_HARMONICS))
        weights = rng.gamma(2.0, size=self.phase.shape) / np.arange(1, _NUM_HARMONICS + 1)
        weights /= np.sqrt((weights**2).sum(axis=(1, 2), keepdims=True) / 2)  # both sensors together have the norm √2
        self.strength = np.repeat(table[:, 1:3], 3, axis=1)
        self.amplitude = weights * self.strength[:, :, None]
        self.gravity = np.zeros((len(table), NUM_CHANNELS))
        lean, heading = np.deg2rad(table[:, 3]), rng.uniform(0, 2 * np.pi, len(table))
        self.gravity[:, 0] = np.sin(lean) * np.cos(heading)
        self.gravity[:, 1] = np.sin(lean) * np.sin(heading)
        self.gravity[:, 2] = np.cos(lean)


class _People:
    """How each person wears the sensor and moves."""

    def __init__(self, activities: int, rng: np.random.Generator) -> None:
        self.tempo = rng.uniform(0.75, 1.33, NUM_PEOPLE)
        self.gain = np.exp(rng.normal(0, 0.2, NUM_PEOPLE))
        self.offset = rng.normal(0, 0.05, (NUM_PEOPLE, NUM_CHANNELS))
        self.rotation = _rotations(rng.normal(0, 1, (NUM_PEOPLE, 3)), np.deg2rad(rng.uniform(0, 60, NUM_PEOPLE)))
        self.habits = rng.dirichlet(np.full(activities, 2.0), NUM_PEOPLE)


def _rotations(axis: Floats, angle: Floats) -> Floats:
    """Returns the rotation around each axis by its angle, by Rodrigues' formula, as [N, 3, 3]."""
    x, y, z = (axis / np.sqrt((axis**2).sum(axis=1, keepdims=True))).T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=1).reshape(-1, 3, 3)
    sine, cosine = np.sin(angle)[:, None, None], np.cos(angle)[:, None, None]
    return np.eye(3) + sine * cross + (1 - cosine) * np.einsum("nij,njk->nik", cross, cross)


def _draw_windows(
    movements: _Movements, people: _People, person: NDArray[np.int64], rng: np.random.Generator
) -> Samples:
    """Returns one window for each entry of `person`, in this order."""
    n = len(person)
    y = (rng.random((n, 1)) > people.habits[person].cumsum(axis=1)[:, :-1]).sum(axis=1).astype(np.int64)
    base_hz = movements.base_hz[y] * people.tempo[person] * np.exp(rng.normal(0, _TEMPO_SPREAD, n))
    strength = np.exp(rng.normal(0, _STRENGTH_SPREAD, n))
    moment = rng.uniform(0, 2 * np.pi, n)
    angle = moment[:, None] + 2 * np.pi * base_hz[:, None] * np.arange(LENGTH) / RATE_HZ
    motion = np.zeros((n, NUM_CHANNELS, LENGTH))
    for h in range(_NUM_HARMONICS):
        volume = strength * ((h + 1) * base_hz < RATE_HZ / 2)  # a sensor filters what it cannot sample
        phase = (h + 1) * angle[:, None, :] + movements.phase[y, :, h, None]
        motion += volume[:, None, None] * movements.amplitude[y, :, h, None] * np.sin(phase)
    motion += _IRREGULARITY * movements.strength[y, :, None] * rng.standard_normal(motion.shape)
    motion += movements.gravity[y, :, None]
    turned = np.einsum("nij,nsjt->nsit", people.rotation[person], motion.reshape(n, 2, 3, LENGTH))
    measured = people.gain[person, None, None] * turned.reshape(motion.shape) + people.offset[person, :, None]
    measured += rng.normal(0, _SENSOR_NOISE, measured.shape)
    x = np.rint(measured * _RESOLUTION) / _RESOLUTION
    return Samples(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))
