from dataclasses import replace

import torch

from shoal.fleet.batches import batch_indices, index_reader, step_keys
from shoal.fleet.flops import FlopCounts
from shoal.fleet.plain import unpadded_batches
from shoal.fleet.vector import concatenate_samples, stacked_batches
from shoal.types import Phase, Samples


def phase(epochs=1, batch_size=4, shuffle=True):
    return Phase("train", epochs, batch_size, lambda s, b: s, shuffle=shuffle)


def test_every_row_once_an_epoch():
    order = batch_indices(10, phase(epochs=3), seed=1)
    assert order.shape == (9, 4)
    for epoch in order.view(3, -1):
        assert sorted(epoch[epoch >= 0].tolist()) == list(range(10))
    assert order[2].tolist()[2:] == [-1, -1]  # the last batch of ten rows holds two
    assert not torch.equal(order[:3], order[3:6])


def test_order_follows_from_the_seed():
    assert torch.equal(batch_indices(50, phase(), 1), batch_indices(50, phase(), 1))
    assert not torch.equal(batch_indices(50, phase(), 1), batch_indices(50, phase(), 2))
    assert batch_indices(5, phase(shuffle=False), 1).tolist() == [[0, 1, 2, 3], [4, -1, -1, -1]]


def test_a_share_of_the_rows_is_drawn_once_for_all_epochs():
    half = replace(phase(epochs=3), share=0.5)
    order = batch_indices(10, half, seed=1)
    assert order.shape == (6, 4)  # five rows an epoch: a batch of four and one of one
    first, second, third = (sorted(epoch[epoch >= 0].tolist()) for epoch in order.view(3, -1))
    assert len(set(first)) == 5
    assert first == second == third
    others = batch_indices(10, half, seed=2).view(3, -1)[0]
    assert sorted(others[others >= 0].tolist()) != first
    still = batch_indices(10, replace(half, shuffle=False), seed=1)[:2].flatten()
    assert still[still >= 0].tolist() == first
    held = Samples(torch.zeros(10, 1), torch.arange(10))
    plain = [b.y.tolist() for b in unpadded_batches(held, half, 1, allows_single_samples=True)]
    assert plain == [rows[rows >= 0].tolist() for rows in order]
    stacked = [b.y[0][b.w[0] > 0].tolist() for b, _ in stacked_batches([held], half, [1])]
    assert stacked == plain
    assert [replace(half, share=0.1).num_samples(n) for n in (0, 1, 4, 10, 100)] == [0, 1, 1, 1, 10]
    assert FlopCounts(per_step=1, per_sample=10, at_end=0, precompute_per_sample=0).total(10, half) == 3 * (
        2 * 1 + 5 * 10
    )


def test_no_rows_no_steps():
    assert batch_indices(0, phase(epochs=2), 1).shape == (0, 4)
    assert batch_indices(3, phase(epochs=0), 1).shape == (0, 4)


def test_keys_differ_by_step_and_seed():
    assert len(set(step_keys(5, 1).tolist() + step_keys(5, 2).tolist())) == 10


def test_stacked_batches_hold_each_clients_own_rows():
    held = [Samples(torch.full((n, 2), float(i)), torch.full((n,), i)) for i, n in enumerate((3, 9, 0))]
    seen = torch.zeros(3)
    lives = []
    for batch, live in stacked_batches(held, phase(), [1, 2, 3]):
        lives.append(live)
        for i in range(3):
            real = batch.w[i] > 0
            assert bool((batch.y[i][real] == i).all())
            assert bool((batch.x[i][real] == i).all())
            seen[i] += real.sum()
    assert seen.tolist() == [3, 9, 0]
    assert lives == [[True, True, False], [False, True, False], [False, True, False]]


def test_nobody_holding_a_row_is_no_batch():
    none = Samples(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    assert list(stacked_batches([none, none], phase(), [1, 2])) == []


def test_rows_are_taken_as_by_indexing():
    rows = torch.tensor([[2, 0], [1, 1]])
    for x in (
        torch.randn(3),
        torch.randn(3, 5),
        torch.randn(3, 2, 4),
        torch.randn(3, 2, 4, 4),
        torch.randn(3, 1, 4, 4),
    ):
        assert torch.equal(index_reader(x)(rows), x[rows])
        assert torch.equal(index_reader(x)(rows[0]), x[rows[0]])
    images = torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    taken = index_reader(images)(rows[0])
    assert torch.equal(taken, images[rows[0]])
    assert taken.is_contiguous(memory_format=torch.channels_last)
    assert index_reader(torch.zeros(0, 4))(rows[:0]).shape == (0, 2, 4)


def test_views_of_one_tensor_are_joined_without_a_copy():
    x, y = torch.randn(9, 3), torch.arange(9)
    held = [Samples(x[5:9], y[5:9]), Samples(x[1:3], y[1:3])]
    whole, labels, starts = concatenate_samples(held)
    assert whole.data_ptr() == x.data_ptr()
    assert starts.tolist() == [5, 1]
    assert torch.equal(whole, x)
    assert torch.equal(labels, y)
    apart = [Samples(x[5:9].clone(), y[5:9]), Samples(x[1:3], y[1:3])]
    whole, labels, starts = concatenate_samples(apart)
    assert labels.tolist() == [5, 6, 7, 8, 1, 2]
    assert starts.tolist() == [0, 4]
    assert torch.equal(whole, torch.cat([e.x for e in apart]))


def test_batch_norm_takes_no_single_rows():
    def rows(n, single_rows, epochs=1):
        held = Samples(torch.zeros(n, 1), torch.arange(n))
        return [b.y.tolist() for b in unpadded_batches(held, phase(epochs), 1, single_rows)]

    assert [len(r) for r in rows(9, True)] == [4, 4, 1]
    joined = rows(9, False)
    assert [len(r) for r in joined] == [4, 5]
    assert sorted(joined[0] + joined[1]) == list(range(9))
    assert rows(1, False, epochs=2) == []
