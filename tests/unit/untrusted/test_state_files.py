"""Checkpoints and files of private state may be damaged: they are read, or refused with one UserError."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from untrusted import damaged, peak_bytes, seeded, value_or_user_error

from shoal.codec import pack
from shoal.errors import UserError
from shoal.store.checkpoint import Checkpoint, Checkpoints
from shoal.store.private import PrivateStore
from shoal.types import ServerState

STATE = ServerState(2, {"global": {"w": torch.ones(2, 3)}}, memory={"probe": {"n": torch.tensor(4)}})


def write_checkpoint(folder: Path) -> Path:
    """Writes the checkpoint of round 2 and returns its folder."""
    Checkpoints(folder).save(STATE, ["000002"])
    return folder / "round-000002"


def undamaged_facts() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (write_checkpoint(Path(folder)) / "state.json").read_bytes()


FACTS = undamaged_facts()
PRIVATE = pack({"a": {"w": torch.ones(2)}, "b": {"w": torch.zeros(3), "deep": {"n": torch.tensor(1)}}})


def load_round_2(folder: Path) -> Checkpoint:
    return Checkpoints(folder).load(2)


@seeded(150)
@given(damaged(FACTS))
def test_damaged_facts_of_a_checkpoint(data):
    with tempfile.TemporaryDirectory() as folder:
        (write_checkpoint(Path(folder)) / "state.json").write_bytes(data)
        value_or_user_error(load_round_2, Path(folder), without=folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@seeded(150)
@given(st.dictionaries(st.sampled_from(["round", "private", "sha256", "format"]), json_values), json_values)
def test_facts_of_any_type(changed, replaced):
    for facts in ({**json.loads(FACTS), **changed}, replaced):
        with tempfile.TemporaryDirectory() as folder:
            (write_checkpoint(Path(folder)) / "state.json").write_text(json.dumps(facts))
            value_or_user_error(load_round_2, Path(folder), without=folder)


@pytest.mark.parametrize(
    "leaves", [{"models": torch.ones(1)}, {"memory": torch.ones(1)}, {"models": {"g": torch.ones(1)}}]
)
def test_tensors_that_match_their_checksum_and_are_no_state(tmp_path, leaves):
    folder, tensors = write_checkpoint(tmp_path), pack(leaves)
    (folder / "state.safetensors").write_bytes(tensors)
    facts = json.loads(FACTS) | {"sha256": hashlib.sha256(tensors).hexdigest()}
    (folder / "state.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="is damaged"):
        load_round_2(tmp_path)


def test_other_folders_beside_checkpoints_are_ignored(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "round-old").mkdir()
    (tmp_path / "round-0000x1").mkdir()
    assert Checkpoints(tmp_path).rounds() == [2]


def test_names_of_private_files_stay_in_their_folder(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "round-000002.safetensors").write_bytes(PRIVATE)
    with pytest.raises(UserError, match=r"'/../../round-000002' is not the name of a file of private state"):
        PrivateStore(tmp_path / "private").check(["/../../round-000002"])


def read_all(folder: Path) -> dict:
    """Reads the private trees of all clients, as a resumed run does."""
    store = PrivateStore(folder)
    store.check(["000002"])
    store.restore(2)
    return dict(store)


def test_undamaged_private_state(tmp_path):
    (tmp_path / "round-000002.safetensors").write_bytes(PRIVATE)
    (tmp_path / "round-notes.safetensors").write_bytes(b"")
    assert set(read_all(tmp_path)) == {"a", "b"}


@seeded(150)
@given(damaged(PRIVATE))
def test_damaged_private_state(data):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "round-000002.safetensors").write_bytes(data)
        value_or_user_error(read_all, Path(folder), without=folder)


@pytest.mark.parametrize("length", [10 * 2**30, 2**62, 2**64 - 1])
def test_a_header_is_not_allocated_before_it_is_there(tmp_path, length):
    """A reader that asks for 10 GB gets them from the system before it sees that the file is short."""
    (tmp_path / "round-000002.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(50))

    def refuse() -> None:
        with pytest.raises(UserError, match="is damaged: its header has"):
            read_all(tmp_path)

    assert peak_bytes(refuse) < 10 * 2**20
