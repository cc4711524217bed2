from dataclasses import replace

import torch

from shoal.fleet.batches import batch_indices, index_reader, step_keys
from shoal.fleet.flops import FlopCounts
from shoal.fleet.plain import unpadded_batches
from shoal.fleet.vector import concatenate_samples, stacked_batches
from shoal.types import Phase, Samples


def phase(epochs=1, batch_size=4, shuffle=True):
    return Phase("train", epochs, batch_size, lambda s, b: s, shuffle=shuffle)


def test_every_sample_once_an_epoch():
    order = batch_indices(10, phase(epochs=3), seed=1)
    assert order.shape == (9, 4)
    for epoch in order.view(3, -1):
        assert sorted(epoch[epoch >= 0].tolist()) == list(range(10))
    assert order[2].tolist()[2:] == [-1, -1]  # the last batch of ten samples has two
    assert not torch.equal(order[:3], order[3:6])


def test_order_follows_from_the_seed():
    assert torch.equal(batch_indices(50, phase(), 1), batch_indices(50, phase(), 1))
    assert not torch.equal(batch_indices(50, phase(), 1), batch_indices(50, phase(), 2))
    assert batch_indices(5, phase(shuffle=False), 1).tolist() == [[0, 1, 2, 3], [4, -1, -1, -1]]


def test_a_fraction_of_the_samples_is_drawn_once_for_all_epochs():
    half = replace(phase(epochs=3), sample_fraction=0.5)
    order = batch_indices(10, half, seed=1)
    assert order.shape == (6, 4)  # five samples per epoch: a batch of four and one of one
    first, second, third = (sorted(epoch[epoch >= 0].tolist()) for epoch in order.view(3, -1))
    assert len(set(first)) == 5
    assert first == second == third
    others = batch_indices(10, half, seed=2).view(3, -1)[0]
    assert sorted(others[others >= 0].tolist()) != first
    unshuffled = batch_indices(10, replace(half, shuffle=False), seed=1)[:2].flatten()
    assert unshuffled[unshuffled >= 0].tolist() == first
    samples = Samples(torch.zeros(10, 1), torch.arange(10))
    plain = [b.y.tolist() for b in unpadded_batches(samples, half, 1, allows_single_samples=True)]
    assert plain == [indices[indices >= 0].tolist() for indices in order]
    stacked = [b.y[0][b.w[0] > 0].tolist() for b, _ in stacked_batches([samples], half, [1])]
    assert stacked == plain
    assert [replace(half, sample_fraction=0.1).num_samples(n) for n in (0, 1, 4, 10, 100)] == [0, 1, 1, 1, 10]
    assert FlopCounts(per_step=1, per_sample=10, at_end=0, precompute_per_sample=0).total(10, half) == 3 * (
        2 * 1 + 5 * 10
    )


def test_no_samples_no_steps():
    assert batch_indices(0, phase(epochs=2), 1).shape == (0, 4)
    assert batch_indices(3, phase(epochs=0), 1).shape == (0, 4)


def test_keys_differ_by_step_and_seed():
    assert len(set(step_keys(5, 1).tolist() + step_keys(5, 2).tolist())) == 10


def test_stacked_batches_contain_each_clients_own_samples():
    samples = [Samples(torch.full((n, 2), float(i)), torch.full((n,), i)) for i, n in enumerate((3, 9, 0))]
    num_samples = torch.zeros(3)
    has_samples_by_step = []
    for batch, has_samples in stacked_batches(samples, phase(), [1, 2, 3]):
        has_samples_by_step.append(has_samples)
        for i in range(3):
            is_sample = batch.w[i] > 0
            assert bool((batch.y[i][is_sample] == i).all())
            assert bool((batch.x[i][is_sample] == i).all())
            num_samples[i] += is_sample.sum()
    assert num_samples.tolist() == [3, 9, 0]
    assert has_samples_by_step == [[True, True, False], [False, True, False], [False, True, False]]


def test_clients_without_samples_have_no_batch():
    empty = Samples(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    assert list(stacked_batches([empty, empty], phase(), [1, 2])) == []


def test_samples_are_read_as_by_indexing():
    indices = torch.tensor([[2, 0], [1, 1]])
    for x in (
        torch.randn(3),
        torch.randn(3, 5),
        torch.randn(3, 2, 4),
        torch.randn(3, 2, 4, 4),
        torch.randn(3, 1, 4, 4),
    ):
        assert torch.equal(index_reader(x)(indices), x[indices])
        assert torch.equal(index_reader(x)(indices[0]), x[indices[0]])
    images = torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    taken = index_reader(images)(indices[0])
    assert torch.equal(taken, images[indices[0]])
    assert taken.is_contiguous(memory_format=torch.channels_last)
    assert index_reader(torch.zeros(0, 4))(indices[:0]).shape == (0, 2, 4)


def test_views_of_one_tensor_are_joined_without_a_copy():
    x, y = torch.randn(9, 3), torch.arange(9)
    views = [Samples(x[5:9], y[5:9]), Samples(x[1:3], y[1:3])]
    inputs, labels, starts = concatenate_samples(views)
    assert inputs.data_ptr() == x.data_ptr()
    assert starts.tolist() == [5, 1]
    assert torch.equal(inputs, x)
    assert torch.equal(labels, y)
    copies = [Samples(x[5:9].clone(), y[5:9]), Samples(x[1:3], y[1:3])]
    inputs, labels, starts = concatenate_samples(copies)
    assert labels.tolist() == [5, 6, 7, 8, 1, 2]
    assert starts.tolist() == [0, 4]
    assert torch.equal(inputs, torch.cat([s.x for s in copies]))


def test_batch_norm_takes_no_single_samples():
    def batches(n, allows_single_samples, epochs=1):
        samples = Samples(torch.zeros(n, 1), torch.arange(n))
        return [b.y.tolist() for b in unpadded_batches(samples, phase(epochs), 1, allows_single_samples)]

    assert [len(b) for b in batches(9, True)] == [4, 4, 1]
    joined = batches(9, False)
    assert [len(b) for b in joined] == [4, 5]
    assert sorted(joined[0] + joined[1]) == list(range(9))
    assert batches(1, False, epochs=2) == []
