"""How a plan is cut into pieces: by the plan, the data and one number."""

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

    def end(self, task, s, counts):
        return Report(), None


def examples(rows):
    return Samples(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64))


def dealt(sizes, pieces, program=None, data=None):
    """The names in each piece, for clients with so many training samples."""
    data = data or {c: {"train": examples(n)} for c, n in sizes.items()}
    plan = Plan(program or Program(), {c: Task(seed=i) for i, c in enumerate(data)})
    found = deal(plan, data, pieces)
    assert sorted(c for piece in found for c in piece) == sorted(data)
    assert all(task is plan.tasks[c] for piece in found for c, task in piece.items())
    return [list(piece) for piece in found]


def test_the_largest_client_goes_first_each_to_the_piece_with_the_least_work():
    # 50 | 40 -> 50 | 40+30 -> 50+20 | 70 -> equal: the first, 50+20+10 | 70
    assert dealt({"a": 10, "b": 50, "c": 30, "d": 40, "e": 20}, 2) == [["b", "e", "a"], ["d", "c"]]


def test_work_is_counted_over_all_passes():
    twice = Program(phases=(Phase("train", 2, 8, lambda s, b: s), Phase("val", 1, 8, lambda s, b: s)))
    data = {
        "a": {"train": examples(10), "val": examples(0)},  # 20
        "b": {"train": examples(1), "val": examples(30)},  # 32
        "c": {"train": examples(5), "val": examples(1)},  # 11
    }
    assert dealt({}, 2, twice, data) == [["b"], ["a", "c"]]


def test_the_order_of_the_tasks_does_not_matter():
    sizes = {f"c{i}": 7 * i % 11 for i in range(20)}
    backwards = dict(reversed(sizes.items()))
    assert dealt(sizes, 3) == dealt(backwards, 3)


def test_a_plan_with_fewer_clients_has_a_piece_for_each():
    assert dealt({"a": 3, "b": 5}, 4) == [["b"], ["a"]]


def test_a_plan_without_tasks_has_no_pieces():
    assert deal(Plan(Program(), {}), {}, 3) == []


@pytest.mark.parametrize(("clients", "pieces", "count"), [(128, 2, 2), (129, 2, 4), (200, 4, 4), (65, 1, 2)])
def test_a_large_plan_is_cut_into_a_multiple(clients, pieces, count):
    assert len(dealt({f"c{i:03d}": 10 for i in range(clients)}, pieces)) == count


def test_a_piece_has_at_most_64_clients_beside_a_client_that_outweighs_all_others():
    # By work alone the piece of the large client would stay with that one, and the other would have all 99.
    sizes = {f"c{i:03d}": 1 for i in range(99)} | {"large": 1000}
    found = dealt(sizes, 2)
    assert [len(piece) for piece in found] == [36, PIECE_CLIENTS]
    assert found[0][0] == "large"


def test_clients_without_work_are_dealt_too():
    nothing = Program(phases=())
    assert [len(piece) for piece in dealt({f"c{i:03d}": 5 for i in range(100)}, 2, nothing)] == [64, 36]
    assert dealt({"a": 5, "b": 5}, 2, nothing) == [["a", "b"]]  # no piece is empty
