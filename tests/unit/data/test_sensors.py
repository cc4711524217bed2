from __future__ import annotations

import numpy as np
import pytest
import torch

import shoal
from shoal.data import list_datasets, load, partition
from shoal.data.sensors import ACTIVITIES
from shoal.errors import UserError


@pytest.fixture(scope="module")
def sensors() -> shoal.Dataset:
    return load("sensors")


def test_windows_have_channels_and_readings(sensors) -> None:
    assert sensors.input_shape == (6, 64)
    assert sensors.train.x.dtype == torch.float32 and sensors.train.y.dtype == torch.int64
    assert sensors.classes == ("walking", "upstairs", "downstairs", "running", "cycling", "standing")
    assert sensors.train.y.unique().tolist() == sensors.test.y.unique().tolist() == list(range(6))
    assert len(sensors.test.y) == pytest.approx(0.2 * len(sensors.train.y), rel=0.01)
    assert {line.name: line for line in list_datasets()}["sensors"].shape == (6, 64)


def test_every_window_has_its_person_as_owner(sensors) -> None:
    assert sensors.owner is not None
    people, sizes = np.unique(np.array(sensors.owner), return_counts=True)
    assert people.tolist() == [f"p{k:02d}" for k in range(30)]
    assert sizes.min() >= 120 and sizes.max() <= 240
    fleet = partition(sensors, "natural", seed=0)
    assert list(fleet) == people.tolist()
    assert [sum(len(fleet[c][s].y) for s in ("train", "val", "test")) for c in fleet] == sizes.tolist()
    assert len(partition(sensors, "natural", clients=7, seed=0)) == 7


def test_the_seed_alone_decides(sensors) -> None:
    again, other = load("sensors"), load("sensors", seed=1)
    assert torch.equal(again.train.x, sensors.train.x) and torch.equal(again.test.y, sensors.test.y)
    assert again.owner == sensors.owner
    assert other.owner != sensors.owner
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002  # the global generators must not matter
    assert torch.equal(load("sensors").test.x, sensors.test.x)


def test_values_are_the_same_on_every_machine(sensors) -> None:
    """Readings are whole steps of the sensor, so that they do not depend on the last bit of a sine."""
    steps = sensors.train.x.double() * 256
    assert torch.equal(steps, steps.round())
    assert sensors.train.y.bincount().tolist() == [710, 1051, 848, 935, 745, 1016]
    assert steps[0, :, 0].tolist() == [-12, -176, 132, -275, -218, -58]


def test_people_differ_in_orientation_gain_and_offset(sensors) -> None:
    """Standing hardly moves, so the mean of its windows is gravity, as the person's sensor reports it."""
    owner = np.array(sensors.owner)
    standing = sensors.train.y.numpy() == sensors.classes.index("standing")
    gravity = np.stack(
        [sensors.train.x.numpy()[standing & (owner == p), :3].mean(axis=(0, 2)) for p in sorted(set(owner))]
    )
    length = np.linalg.norm(gravity, axis=1)
    assert 0.15 < length.std() < 0.35  # the gain
    angle = np.rad2deg(np.arccos(gravity[:, 2] / length))
    assert angle.min() < 12 and 40 < angle.max() < 75


def test_people_differ_in_tempo(sensors) -> None:
    owner = np.array(sensors.owner)
    running = sensors.train.y.numpy() == sensors.classes.index("running")

    def main_frequency(person: str) -> float:
        x = sensors.train.x.numpy()[running & (owner == person)]
        power = (np.abs(np.fft.rfft(x - x.mean(axis=2, keepdims=True))) ** 2).sum(axis=(0, 1))
        return float(np.fft.rfftfreq(64, 1 / 20)[power[:14].argmax()])  # below 4.1 Hz, without harmonics

    found = [main_frequency(p) for p in sorted(set(owner)) if (running & (owner == p)).sum() >= 10]
    assert min(found) < 2.4 and max(found) > 3.0


@pytest.mark.parametrize("number", [6, 12])
def test_the_number_of_activities_can_be_chosen(number: int) -> None:
    d = load(f"sensors:{number}")
    assert d.name == f"sensors:{number}"
    assert d.classes == tuple(activity.name for activity in ACTIVITIES[:number])
    assert len(set(d.classes)) == number == len(d.train.y.unique())


@pytest.mark.parametrize("name", ["sensors:", "sensors:5", "sensors:13", "sensors:six", "sensors:6,2", "sensors:-6"])
def test_bad_numbers_of_activities(name: str) -> None:
    with pytest.raises(
        UserError, match=r"is not sensors or sensors:ACTIVITIES, with 6 to 12 activities, as in sensors:8"
    ):
        load(name)


def test_a_network_learns_activities(sensors) -> None:
    """After ten rounds the model is far better than always predicting the most frequent activity."""
    fleet = partition(sensors, "natural", clients=6, seed=0)
    result = shoal.run("fedavg", fleet, rounds=10, cohort=3, epochs=2, lr=0.2, model="cnn-1d", seed=0)
    assert result.accuracy["local"] > 0.6


def test_rotations_keep_lengths_and_orientation() -> None:
    from shoal.data.sensors import _rotations

    rotation = _rotations(np.random.default_rng(0).normal(size=(20, 3)), np.linspace(0, np.pi, 20))
    assert np.allclose(rotation @ rotation.transpose(0, 2, 1), np.eye(3))
    assert np.allclose(np.linalg.det(rotation), 1)
    assert np.allclose(np.trace(rotation, axis1=1, axis2=2), 1 + 2 * np.cos(np.linspace(0, np.pi, 20)))
