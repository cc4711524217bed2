"""Recipes, studies, device files, options and partitions may contain any text: a value, or one UserError."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from untrusted import damaged, mutated_texts, peak_bytes, seeded, value_or_user_error

from shoal.cost.devices import assign_profiles
from shoal.data.dataset import Dataset
from shoal.data.partitions import check_partition, partition
from shoal.errors import UserError
from shoal.experiment.job import Job, make_job, parse_amount, parse_options
from shoal.experiment.recipe import Recipe, load_recipe
from shoal.methods.composition.compose import parse_composition
from shoal.study.plan import Study, load_study
from shoal.types import Samples

RECIPE = b"""title = "t"
data = "digits"
rounds = 3
cohort = 0.5
[set.train]
mu = 0.1
[grid]
method = ["fedprox", "fedavg"]
seed = [0, 1]
"set.train" = [{mu = 0.1}, {mu = 1.0}]
[only.fedavg]
epochs = 1
[variants.slow]
lr = 0.01
[paper]
rows = 1
"""
STUDY = b"""title = "s"
our_variant = "a"
[job]
data = "digits"
[variants.a]
method = "fedavg"
[variants."b c"]
method = "fedprox"
[cells.one]
rounds = 2
target_accuracy = 0.5
[budgets.small]
seeds = [0, 1]
[budgets.small.cells.one]
variants = ["a"]
[[claims]]
statement = "a is better"
[[claims.tests]]
kind = "difference"
cells = ["one"]
variant = "a"
baseline = "b c"
metric = "local"
at_least = 0.1
"""
BOARDS = b"""[mine]
flops_per_s = 1e9
active_w = 3.0
idle_w = 0.5
memory_bytes = 1000
source = "measured"
"""
VALUES = (
    *(
        "1",
        "-1",
        "0.5",
        "nan",
        "inf",
        "true",
        '"x"',
        "[]",
        "[1]",
        "[[1]]",
        "{}",
        "{a = 1}",
        "1979-05-27",
        '"\\u001b[31m"',
    ),
    *(
        "1" * 5000,
        "0x" + "f" * 5000,
        "[" * 3000,
        "{a=" * 2000,
        '"' + "long " * 1000 + '"',
        '[1, "a"]',
        "9" * 400,
        "1e999",
    ),
)
KEYS = (
    "title",
    "method",
    "rounds",
    "cohort",
    "seed",
    "set",
    "set.train",
    "set.train.mu",
    '"set.train.mu"',
    "grid",
    "grid.seed",
    "grid.variant",
    "grid.set",
    "only",
    "only.fedavg",
    "only.fedavg.set",
    "variants",
    "variants.v",
    "variants.v.lr",
    "edges",
    "budgets",
    "paper",
    "partition",
    "client_column",
    "job",
    "cells",
    "cells.one",
    "claims",
    "our_variant",
    "variant_lists.x",
    "budgets.small.seeds",
    "budgets.small.cells",
    "budgets.small.cells.one.variants",
    "num_inputs",
    "mine.source",
    "mine.flops_per_s",
    "mine",
)
lines = st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)).map(" = ".join)
toml_texts = st.lists(lines, max_size=5, unique_by=lambda line: line.split(" =")[0]).map("\n".join)


def read_text(read, content: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.toml"
        path.write_bytes(content)
        return value_or_user_error(read, path, without=folder)


def read_recipe(path: Path) -> Recipe:
    return load_recipe(path, {})


def read_study(path: Path) -> Study:
    study = load_study(path)
    for name in study.budgets:
        study.entries(name)
    return study


def read_boards(path: Path) -> dict:
    return assign_profiles(f"{path}#mine", ["a", "b"], 0)


def names_own_code(content: bytes) -> bool:
    """Whether a file may name a class or function of the user, which would be imported. See SECURITY.md."""
    return b":" in content


READERS = {"recipe": (read_recipe, RECIPE), "study": (read_study, STUDY), "boards": (read_boards, BOARDS)}


@pytest.mark.parametrize("kind", READERS)
def test_undamaged_files_are_read(kind):
    read, content = READERS[kind]
    assert not isinstance(read_text(read, content), UserError)


@pytest.mark.parametrize("kind", READERS)
@seeded(120)
@given(drawn=st.data())
def test_damaged_files(kind, drawn):
    read, content = READERS[kind]
    data = drawn.draw(damaged(content))
    assume(not names_own_code(data))
    read_text(read, data)


@pytest.mark.parametrize("kind", READERS)
@seeded(200)
@given(text=toml_texts, appends=st.booleans())
def test_files_with_keys_of_any_type(kind, text, appends):
    read, content = READERS[kind]
    read_text(read, text.encode() + (b"\n" + content if appends else b""))


HOSTILE = {
    "nested": b"x = " + b"[" * 100_000,
    "nested tables": b"x = " + b"{a = " * 100_000,
    "many digits": b"rounds = " + b"1" * 10_000,
    "many hexadecimal digits": b"rounds = 0x" + b"f" * 10_000,
    "deep key": b".".join([b"a"] * 50_000) + b" = 1",
    "deep key of set": b"set." + b".".join([b"a"] * 50_000) + b" = 1",
    "a grid of 10^20 jobs": b"[grid]\n"
    + b"".join(
        b"%s = %r\n" % (k, list(range(1, 101)))
        for k in (
            *(b"seed", b"rounds", b"epochs", b"batch_size", b"clients"),
            *(b"workers", b"pieces", b"eval_every", b"min_samples", b"lr"),
        )
    ),
    "a terminal's control characters": b'[grid]\n"\\u001b[2J" = [1]\nmethod = ["\\u001b[2J", "\\u001b[2J"]',
    "a long value": b'rounds = "' + b"x" * 100_000 + b'"',
    "a long key": b"x" * 100_000 + b" = 1",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", READERS)
def test_hostile_files_are_refused_in_bounded_memory(kind, name):
    read, _ = READERS[kind]
    results = []
    assert peak_bytes(lambda: results.append(read_text(read, HOSTILE[name]))) < 100 * 2**20
    assert isinstance(results[0], UserError)


# --- Partitions -------------------------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(0)
DATASET = Dataset(
    name="small",
    train=Samples(torch.rand(60, 1, 4, 4, generator=GENERATOR), torch.arange(60) % 3),
    test=Samples(torch.rand(9, 1, 4, 4, generator=GENERATOR), torch.arange(9) % 3),
    classes=("a", "b", "c"),
    owner=tuple(f"o{i % 5}" for i in range(60)),
)
PARTITION_WORDS = (
    *(
        "iid",
        "dirichlet",
        "equal",
        "groups",
        "labels",
        "shards",
        "quantity",
        "natural",
        "drop",
        "rotate",
        "invert",
        "noise",
    ),
    *(
        "mislabel",
        "permute",
        ":",
        "+",
        ",",
        "/",
        "-",
        "0.3",
        "1",
        "2",
        "0-2",
        "0/1/2",
        "0-1/2",
        "1e-300",
        "1e300",
        "1e999",
    ),
    *("nan", "-1", "0", "90", "0-99999999999", "²", "٣", "1_0", "9" * 400),
)


def divide(spec: str) -> object:
    check_partition(spec)
    return partition(DATASET, spec, clients=4, seed=0, min_samples=3)


specs = st.tuples(
    st.sampled_from(
        [
            "iid",
            "dirichlet:",
            "equal:",
            "groups:",
            "labels:",
            "shards:",
            "quantity:",
            "natural:",
            "iid+rotate:",
            "iid+invert:",
            "iid+noise:",
            "iid+mislabel:",
            "iid+permute:",
        ]
    ),
    mutated_texts(PARTITION_WORDS, joiners=("",))
    | st.lists(st.floats(), max_size=3).map(lambda x: ",".join(map(str, x))),
).map("".join)


@seeded(400)
@given(specs | mutated_texts(PARTITION_WORDS, joiners=("",)))
def test_partitions(spec):
    assert peak_bytes(lambda: value_or_user_error(divide, spec)) < 50 * 2**20


@pytest.mark.parametrize(
    "spec",
    [
        "labels:0-99999999999",
        "labels:0-9999999999999999999999/1",
        "shards:1e300",
        "iid+" * 50_000 + "rotate:0",
        "iid" * 50_000,
    ],
)
def test_hostile_partitions(spec):
    assert peak_bytes(lambda: value_or_user_error(divide, spec)) < 50 * 2**20


# --- Options of the command line --------------------------------------------------------------------------------------


@seeded(200)
@given(mutated_texts(("train.mu=", "=", ".", *VALUES), joiners=("",)))
def test_options_and_amounts(text):
    value_or_user_error(parse_options, [text])
    value_or_user_error(parse_amount, "--cohort", text)


@seeded(150)
@given(
    mutated_texts(
        ("cluster", "=", ",", "aidc", "train", "proximal", "represent", "sparsity", "select", "turns"), joiners=("",)
    )
)
def test_compositions(text):
    assume(":" not in text)
    value_or_user_error(parse_composition, text)


@seeded(200)
@given(
    mutated_texts(
        ("pi", ":", ",", "phone", "0.5", "1e308", "nan", "-1", "#", ".toml", "\0", "1e-320"), joiners=("", ",")
    )
)
def test_devices(spec):
    result = value_or_user_error(assign_profiles, spec, [f"c{i}" for i in range(5)], 0)
    assert isinstance(result, UserError) or len(result) == 5


def test_shares_whose_sum_is_infinite():
    with pytest.raises(UserError, match="share"):
        assign_profiles("pi:1e308,phone:1e308", ["a", "b"], 0)


@seeded(200)
@given(
    st.dictionaries(
        st.sampled_from(list(Job.model_fields)),
        st.none()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
        max_size=3,
    )
)
def test_jobs_of_any_values(values):
    assume(":" not in str(values.get("method")))
    value_or_user_error(make_job, values)
