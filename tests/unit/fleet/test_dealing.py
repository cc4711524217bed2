"""Plans are cut into pieces that follow from the plan, the data and one number."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from shoal.fleet.dealing import PIECE_CLIENTS, deal
from shoal.types import Phase, Plan, Report, Samples, Task


@dataclass(frozen=True)
class Program:
    name: str = "work"
    batchable: bool = True
    phases: tuple[Phase, ...] = field(default=(Phase("train", 1, 8, lambda s, b: s),))

    def begin(self, task, private):
        return {}

    def end(self, task, state, counts):
        return Report(), None


def make_samples(num_samples):
    return Samples(torch.zeros(num_samples, 2), torch.zeros(num_samples, dtype=torch.int64))


def clients_by_piece(sizes, pieces, program=None, data=None):
    """Returns the clients of each piece, for clients with these numbers of training samples."""
    data = data or {c: {"train": make_samples(n)} for c, n in sizes.items()}
    plan = Plan(program or Program(), {c: Task(seed=i) for i, c in enumerate(data)})
    tasks_by_piece = deal(plan, data, pieces)
    assert sorted(c for piece in tasks_by_piece for c in piece) == sorted(data)
    assert all(task is plan.tasks[c] for piece in tasks_by_piece for c, task in piece.items())
    return [list(piece) for piece in tasks_by_piece]


def test_the_largest_client_goes_first_each_to_the_piece_with_the_least_work():
    # 50 | 40 -> 50 | 40+30 -> 50+20 | 70 -> equal: the first, 50+20+10 | 70
    assert clients_by_piece({"a": 10, "b": 50, "c": 30, "d": 40, "e": 20}, 2) == [["b", "e", "a"], ["d", "c"]]


def test_work_is_counted_over_all_epochs():
    twice = Program(phases=(Phase("train", 2, 8, lambda s, b: s), Phase("val", 1, 8, lambda s, b: s)))
    data = {
        "a": {"train": make_samples(10), "val": make_samples(0)},  # 20
        "b": {"train": make_samples(1), "val": make_samples(30)},  # 32
        "c": {"train": make_samples(5), "val": make_samples(1)},  # 11
    }
    assert clients_by_piece({}, 2, twice, data) == [["b"], ["a", "c"]]


def test_the_order_of_the_tasks_does_not_matter():
    sizes = {f"c{i}": 7 * i % 11 for i in range(20)}
    backwards = dict(reversed(sizes.items()))
    assert clients_by_piece(sizes, 3) == clients_by_piece(backwards, 3)


def test_a_plan_with_fewer_clients_has_a_piece_for_each():
    assert clients_by_piece({"a": 3, "b": 5}, 4) == [["b"], ["a"]]


def test_a_plan_without_tasks_has_no_pieces():
    assert deal(Plan(Program(), {}), {}, 3) == []


@pytest.mark.parametrize(("clients", "pieces", "num_pieces"), [(128, 2, 2), (129, 2, 4), (200, 4, 4), (65, 1, 2)])
def test_a_large_plan_is_cut_into_a_multiple(clients, pieces, num_pieces):
    assert len(clients_by_piece({f"c{i:03d}": 10 for i in range(clients)}, pieces)) == num_pieces


def test_a_piece_has_at_most_64_clients_beside_a_client_that_outweighs_all_others():
    # By work alone, the large client would have a piece of its own, and the other piece would have all 99 clients.
    sizes = {f"c{i:03d}": 1 for i in range(99)} | {"large": 1000}
    pieces = clients_by_piece(sizes, 2)
    assert [len(piece) for piece in pieces] == [36, PIECE_CLIENTS]
    assert pieces[0][0] == "large"


def test_clients_without_work_are_dealt_too():
    nothing = Program(phases=())
    assert [len(piece) for piece in clients_by_piece({f"c{i:03d}": 5 for i in range(100)}, 2, nothing)] == [64, 36]
    assert clients_by_piece({"a": 5, "b": 5}, 2, nothing) == [["a", "b"]]  # no piece is empty
