import torch
from torch.func import vmap

from shoal.rng import derive_seed, uniform


def test_derived_seeds_differ_by_every_part():
    seeds = {derive_seed(s, r, name) for s in range(3) for r in range(3) for name in ("a", "b")}
    assert len(seeds) == 18
    assert derive_seed(1, "x") == derive_seed(1, "x")
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_uniform_is_the_same_alone_and_stacked():
    keys = torch.tensor([5, 2**40 + 7, 123456789012345])
    stacked = vmap(lambda k: uniform(k, (4, 3)))(keys)
    for key, row in zip(keys, stacked, strict=True):
        assert torch.equal(uniform(key, (4, 3)), row)


def test_uniform_looks_uniform():
    x = torch.stack([uniform(torch.tensor(k), (1000,)) for k in range(100)])
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    # standard error of the mean of 1e5 uniforms is 0.289 / 316 = 0.0009; of a bin of 10: 0.00095
    assert abs(float(x.mean()) - 0.5) < 0.005
    bins = torch.histc(x.flatten(), 10, 0, 1) / x.numel()
    assert float((bins - 0.1).abs().max()) < 0.005
    # neighbouring keys and positions are unrelated
    assert abs(float(torch.corrcoef(torch.stack([x[0], x[1]]))[0, 1])) < 0.15
    assert abs(float(torch.corrcoef(torch.stack([x[0, :-1], x[0, 1:]]))[0, 1])) < 0.15


def test_streams_differ():
    key = torch.tensor(3)
    assert not torch.equal(uniform(key, (8,), 1), uniform(key, (8,), 2))
