"""The partition of a data set: assigns the training samples to clients, and each client's samples to its splits.

A partition is one base, such as `dirichlet:0.3`, and any number of shifts (`shifts.py`). `partition_grammar.py` reads
its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Dataset
from shoal.data.federation import (
    DEFAULT_SENSITIVE_FRACTION,
    SPLITS,
    SPLITS_WITH_SENSITIVE,
    Federation,
    num_sensitive_samples,
)
from shoal.data.partition_grammar import Term, parse_partition
from shoal.data.prepare import proportional_mask
from shoal.data.shifts import SHIFTS, ShiftEffect, ShiftTarget
from shoal.data.unseen import HoldOut
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import ClientId, Samples

_MAX_DRAWS = 1000
_UNASSIGNED = -1

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _PartitionRequest:
    dataset: Dataset
    sample_indices: Indices  # training samples that are assigned to clients
    num_clients: int | None
    min_samples: int
    rng: np.random.Generator
    unseen_owners: frozenset[ClientId] = frozenset()  # these owners always become clients, and are then held out

    @property
    def y(self) -> Indices:
        """The labels of the samples."""
        return self.dataset.train.y.numpy()[self.sample_indices]

    @property
    def reduce_hint(self) -> str:
        """The flags that can be lowered so that every client has enough samples."""
        num_public = len(self.dataset.train.y) - len(self.sample_indices)
        return "a smaller --min-samples" + (f" or --public-samples, now {num_public}" if num_public else "")

    def require_num_clients(self, term: Term) -> int:
        """Returns the number of clients, or raises a UserError if there is none or the samples are too few for it."""
        if self.num_clients is None:
            raise UserError(f"partition {term.name!r} needs the number of clients, as in --clients 100.")
        if self.num_clients * self.min_samples > len(self.sample_indices):
            raise UserError(
                f"clients is {self.num_clients}, but {len(self.sample_indices)} training samples are enough for "
                f"{len(self.sample_indices) // self.min_samples} with at least {self.min_samples} each. "
                f"Ask for fewer clients or {self.reduce_hint}."
            )
        return self.num_clients


class _Assignment(NamedTuple):
    client_of_sample: Indices  # index of the client of each sample, or _UNASSIGNED
    client_ids: tuple[ClientId, ...]
    planted_groups: Indices | None = None
    note: str = ""


def partition(
    dataset: Dataset,
    spec: str,
    *,
    clients: int | None = None,
    seed: int,
    min_samples: int = 10,
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    sensitive_fraction: float = DEFAULT_SENSITIVE_FRACTION,
    public_samples: int = 0,
    unseen: int | float = 0,
    device: torch.device | str = "cpu",
) -> Federation:
    """Divides a data set into clients.

    Parameters
    ----------
    dataset : Dataset
        The data set.
    spec : str
        One base and any number of shifts, such as `iid`, `dirichlet:0.3` or `groups:5,1+rotate:0,90`.
    clients : int or None
        Number of clients. None: all owners of samples, for the base `natural`.
    seed : int
        Seed of all random choices.
    min_samples : int
        Least number of samples of a client.
    val_fraction, test_fraction : float
        Fractions of a client's samples for validation and for testing.
    sensitive_fraction : float
        Fraction of a client's training and validation samples that is sensitive, unless the data set names the
        sensitive samples.
    public_samples : int
        Number of training samples that no client has and that are not shifted. The server may use them.
    unseen : int or float
        Number or fraction of the clients that are held out of training, chosen at random. If samples have owners, no
        sample of an unseen client is public. The test part of a file and the scaling of its columns exclude the unseen
        clients only if `load` got the same `unseen`.
    device : torch.device or str
        Device of the tensors.

    Returns
    -------
    Federation
        The clients with their data.

    Raises
    ------
    UserError
        If the text of the partition is wrong, or the data set has too few samples for it.
    """
    base, shifts = check_partition(spec)
    _check_fractions(val_fraction, test_fraction, min_samples)
    hold_out = HoldOut(unseen, seed, clients, min_samples) if unseen else None
    unseen_owners = _choose_unseen_owners(dataset, hold_out) if base.name == "natural" else frozenset()
    public_indices = _choose_public_samples(dataset, public_samples, seed, unseen_owners)
    sample_indices = np.setdiff1d(np.arange(len(dataset.train.y)), public_indices)
    assignment = _assign_samples(dataset, base, clients, seed, min_samples, sample_indices, unseen_owners)
    order, bounds = _order_and_bounds(assignment, val_fraction, test_fraction, seed, dataset.is_sensitive)
    index = torch.from_numpy(order)
    samples = Samples(dataset.train.x[index], dataset.train.y[index])
    target = ShiftTarget(
        samples=samples,
        client_of_sample=torch.from_numpy(assignment.client_of_sample)[index],
        first_test_sample=int(bounds["test"][0]),
        num_clients=len(assignment.client_ids),
        num_classes=len(dataset.classes),
        seed=seed,
    )
    effects = [SHIFTS[term.name].apply(target, term) for term in shifts]
    federation = Federation(
        samples,
        bounds,
        assignment.client_ids,
        central=dataset.test,
        classes=dataset.classes,
        name=dataset.name,
        partition=spec,
        note="; ".join(
            note
            for note in (
                dataset.note,
                assignment.note,
                _sensitive_note(dataset.is_sensitive),
                _public_note(public_samples),
            )
            if note
        ),
        shifts=_describe_shifts(assignment.client_ids, effects),
        planted_groups=_combine_planted_groups(assignment, effects),
        num_sensitive=_count_sensitive(bounds, order, dataset.is_sensitive, sensitive_fraction),
        public_samples=Samples(dataset.train.x[public_indices], dataset.train.y[public_indices]),
        edge_of_client=_edge_of_clients(dataset, assignment),
        preparation=dataset.preparation,
    )
    if hold_out is not None:
        federation = federation.hold_out(
            unseen_owners & set(assignment.client_ids) or hold_out.choose_clients(assignment.client_ids)
        )
    return federation if torch.device(device).type == "cpu" else federation.to(device)


def check_partition(spec: str) -> tuple[Term, list[Term]]:
    """Returns the base and the shifts of a partition, or raises a UserError if a name is unknown."""
    examples = ({name: entry.example for name, entry in entries.items()} for entries in (BASES, SHIFTS))
    return parse_partition(spec, *examples)


def _edge_of_clients(dataset: Dataset, assignment: _Assignment) -> dict[ClientId, str] | None:
    """Returns the edge of each client, which must be the same for all samples of the client."""
    if dataset.edge is None:
        return None
    edge_of_client: dict[ClientId, str] = {}
    for k, edge in zip(assignment.client_of_sample.tolist(), dataset.edge, strict=True):
        if k == _UNASSIGNED:
            continue
        client = assignment.client_ids[k]
        if edge_of_client.setdefault(client, edge) != edge:
            raise UserError(
                f"client {client!r} has samples under the edges {edge_of_client[client]!r} and {edge!r}. "
                "All its samples must have the same edge."
            )
    return edge_of_client


def _choose_unseen_owners(dataset: Dataset, hold_out: HoldOut | None) -> frozenset[ClientId]:
    """Returns the owners that are held out: those that were chosen when the data set was loaded, else a new choice."""
    if hold_out is None:
        return frozenset()
    owner, owners = _owner_indices(dataset)
    if not dataset.unseen:
        return hold_out.choose_owners([owners[i] for i in owner.tolist()])
    if isinstance(hold_out.unseen, int) and hold_out.unseen != len(dataset.unseen):
        raise UserError(
            f"unseen is {hold_out.unseen}, but {dataset.name} was loaded with {len(dataset.unseen)} unseen clients. "
            "Use the same number."
        )
    return dataset.unseen


def make_client_ids(num_clients: int) -> tuple[ClientId, ...]:
    """Returns names such as c00 to c99, in the order of the clients."""
    width = len(str(num_clients - 1))
    return tuple(f"c{i:0{width}d}" for i in range(num_clients))


def _check_fractions(val_fraction: float, test_fraction: float, min_samples: int) -> None:
    for name, fraction in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= fraction < 1:
            raise UserError(f"{name} is {fraction}, but it must be at least 0 and below 1.")
    if val_fraction + test_fraction >= 1:
        raise UserError(
            f"val_fraction {val_fraction} and test_fraction {test_fraction} leave nothing to train on. Lower one."
        )
    num_splits = 1 + (val_fraction > 0) + (test_fraction > 0)
    if min_samples < num_splits:
        raise UserError(
            f"min_samples is {min_samples}, but a client needs at least {num_splits} samples, one for each split."
        )


def _choose_public_samples(dataset: Dataset, num_public: int, seed: int, unseen_owners: frozenset[ClientId]) -> Indices:
    """Draws the public samples. None of them is marked as sensitive or belongs to an owner that is held out."""
    num_samples = len(dataset.train.y)
    candidates = (
        np.arange(num_samples) if dataset.is_sensitive is None else np.flatnonzero(~dataset.is_sensitive.numpy())
    )
    if unseen_owners and dataset.owner is not None:
        candidates = np.array([i for i in candidates.tolist() if dataset.owner[i] not in unseen_owners], dtype=np.int64)
    max_public = min(len(candidates), num_samples - 1)
    if not 0 <= num_public <= max_public:
        raise UserError(
            f"public_samples is {num_public}, but 0 to {max_public} training samples of {dataset.name} can be public."
        )
    return candidates[proportional_mask(dataset.train.y.numpy()[candidates], num_public, derive_seed(seed, "public"))]


def _public_note(num_public: int) -> str:
    return f"{num_public:,} training samples are public" if num_public else ""


def _assign_samples(
    dataset: Dataset,
    base: Term,
    num_clients: int | None,
    seed: int,
    min_samples: int,
    sample_indices: Indices,
    unseen_owners: frozenset[ClientId],
) -> _Assignment:
    if num_clients is not None and num_clients < 1:
        raise UserError(f"clients is {num_clients}, but it must be at least 1.")
    rng = np.random.default_rng(derive_seed(seed, "partition", base.name))
    request = _PartitionRequest(dataset, sample_indices, num_clients, min_samples, rng, unseen_owners)
    assignment = BASES[base.name].assign(request, base)
    assigned = assignment.client_of_sample[assignment.client_of_sample != _UNASSIGNED]
    smallest = int(np.bincount(assigned, minlength=len(assignment.client_ids)).min())
    if smallest < min_samples:
        raise UserError(
            f"partition {base.name!r} leaves a client with {smallest} samples, fewer than {min_samples}. "
            f"Ask for fewer clients or {request.reduce_hint}."
        )
    client_of_sample = np.full(len(dataset.train.y), _UNASSIGNED)
    client_of_sample[sample_indices] = assignment.client_of_sample
    return assignment._replace(client_of_sample=client_of_sample)


def _iid(request: _PartitionRequest, term: Term) -> _Assignment:
    term.refuse_argument()
    clients = request.require_num_clients(term)
    return _Assignment(_assign_evenly(len(request.y), np.arange(clients), request.rng), make_client_ids(clients))


def _dirichlet(request: _PartitionRequest, term: Term) -> _Assignment:
    (alpha,) = term.parse_named_numbers("ALPHA")
    clients = request.require_num_clients(term)
    return _Assignment(_assign_dirichlet(request.y, np.arange(clients), alpha, request, term), make_client_ids(clients))


def _equal(request: _PartitionRequest, term: Term) -> _Assignment:
    (alpha,) = term.parse_named_numbers("ALPHA")
    clients = request.require_num_clients(term)
    counts = _equal_counts(np.bincount(request.y), clients, term.require_positive("ALPHA", alpha), request.rng)
    return _Assignment(_assign_by_counts(request.y, counts, np.arange(clients), request.rng), make_client_ids(clients))


def _quantity(request: _PartitionRequest, term: Term) -> _Assignment:
    """Assigns samples as if all were of one class, so that only the sizes differ."""
    (alpha,) = term.parse_named_numbers("ALPHA")
    clients = request.require_num_clients(term)
    one_class = np.zeros_like(request.y)
    return _Assignment(_assign_dirichlet(one_class, np.arange(clients), alpha, request, term), make_client_ids(clients))


def _groups(request: _PartitionRequest, term: Term) -> _Assignment:
    count, alpha = term.parse_named_numbers("RHO", "ALPHA")
    blocks = term.require_whole_number("RHO", count)
    classes = np.array_split(np.arange(len(request.dataset.classes)), blocks)
    return _assign_in_blocks(classes, request, term, lambda y, ids: _assign_dirichlet(y, ids, alpha, request, term))


def _labels(request: _PartitionRequest, term: Term) -> _Assignment:
    classes = _parse_label_groups(term, len(request.dataset.classes))
    return _assign_in_blocks(classes, request, term, lambda y, ids: _assign_evenly(len(y), ids, request.rng))


def _assign_in_blocks(
    classes: Sequence[Indices], request: _PartitionRequest, term: Term, assign: Callable[[Indices, Indices], Indices]
) -> _Assignment:
    """Assigns the samples of each group of classes to one block of clients, and within the block by `assign`."""
    clients, blocks = request.require_num_clients(term), len(classes)
    max_blocks = min(clients, len(request.dataset.classes))
    if blocks > max_blocks:
        raise term.error(
            f"{clients} clients and {len(request.dataset.classes)} classes cannot form {blocks} groups, "
            f"but at most {max_blocks}"
        )
    client, group = np.empty(len(request.y), dtype=np.int64), np.empty(clients, dtype=np.int64)
    for i, ids in enumerate(np.array_split(np.arange(clients), blocks)):
        inside = np.flatnonzero(np.isin(request.y, classes[i]))
        if len(inside) < len(ids) * request.min_samples:
            raise term.error(
                f"group {i} has {len(inside)} samples, too few for {len(ids)} clients with {request.min_samples} each"
            )
        client[inside] = assign(request.y[inside], ids)
        group[ids] = i
    return _Assignment(client, make_client_ids(clients), group)


def _parse_label_groups(term: Term, num_classes: int) -> list[Indices]:
    """Reads text such as `0-2/3,5/4`, which is [[0, 1, 2], [3, 5], [4]]. Every class must be in exactly one group."""
    try:
        spans = [[_parse_label_range(span) for span in group.split(",")] for group in term.argument.split("/")]
    except ValueError as error:
        raise term.error("groups of class numbers need / between them") from error
    # A range may be longer than the memory, so it is compared before its labels are listed.
    is_within = all(not span or 0 <= span[0] <= span[-1] < num_classes for group in spans for span in group)
    groups = [[label for span in group for label in span] for group in spans] if is_within else []
    if sorted(label for group in groups for label in group) != list(range(num_classes)) or [] in groups:
        raise term.error(f"each of the classes 0 to {num_classes - 1} must be in exactly one group")
    return [np.array(group) for group in groups]


def _parse_label_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _shards(request: _PartitionRequest, term: Term) -> _Assignment:
    """Sorts samples by label, cuts them into K shards of nearly equal size per client, and assigns shards at random."""
    (count,) = term.parse_named_numbers("K")
    clients, num_samples = request.require_num_clients(term), len(request.y)
    shards = term.require_whole_number("K", count) * clients
    if shards > num_samples:
        raise term.error(f"{shards} shards cannot be cut from {num_samples} samples")
    client_of_shard = request.rng.permutation(shards) % clients
    client = np.empty(num_samples, dtype=np.int64)
    shard_of_rank = np.arange(num_samples) * shards // num_samples
    client[_shuffled_class_order(request.y, request.rng)] = client_of_shard[shard_of_rank]
    return _Assignment(client, make_client_ids(clients))


def _natural(request: _PartitionRequest, term: Term) -> _Assignment:
    if term.argument not in ("", "drop"):
        raise term.error("only drop may follow the colon")
    owner, owners = _owner_indices(request.dataset)
    owner = owner[request.sample_indices]
    large = np.bincount(owner, minlength=len(owners)) >= request.min_samples
    small = int((~large).sum())
    if small == len(owners) or (small and term.argument != "drop"):
        raise UserError(
            f"partition 'natural': {small} of {len(owners)} clients have fewer than {request.min_samples} samples. "
            f"Ask for {request.reduce_hint}, or leave these clients out with natural:drop."
        )
    required = large & np.array([name in request.unseen_owners for name in owners])
    chosen = _choose_owners(
        np.flatnonzero(large & ~required), np.flatnonzero(required), request.num_clients, request.rng
    )
    renumbered = np.full(len(owners), _UNASSIGNED)
    renumbered[chosen] = np.arange(len(chosen))
    note = f"{small} of {len(owners)} clients left out: fewer than {request.min_samples} samples" if small else ""
    return _Assignment(renumbered[owner], tuple(owners[i] for i in chosen), note=note)


def _owner_indices(dataset: Dataset) -> tuple[Indices, list[ClientId]]:
    """Returns the index of each sample's owner among the sorted owners, and the owners."""
    if dataset.owner is None:
        raise UserError(
            f"partition 'natural': {dataset.name} has no owners of samples. "
            "Name the column with the clients of your own data with --client-column."
        )
    owners = sorted(set(dataset.owner))
    index_of_owner = {owner: i for i, owner in enumerate(owners)}
    return np.fromiter(map(index_of_owner.__getitem__, dataset.owner), np.int64, len(dataset.owner)), owners


def _choose_owners(
    candidates: Indices, required: Indices, num_clients: int | None, rng: np.random.Generator
) -> Indices:
    """Returns all required owners, and as many random candidates as the number of clients leaves room for."""
    if num_clients is None:
        return np.sort(np.concatenate([candidates, required]))
    if num_clients > len(candidates) + len(required):
        raise UserError(
            f"clients is {num_clients}, but only {len(candidates) + len(required)} owners have enough samples. "
            "Ask for fewer clients."
        )
    return np.sort(np.concatenate([rng.choice(candidates, num_clients - len(required), replace=False), required]))


def _assign_evenly(num_samples: int, ids: Indices, rng: np.random.Generator) -> Indices:
    """Returns a random client for each sample. The numbers of samples differ by at most one."""
    client = np.empty(num_samples, dtype=np.int64)
    client[rng.permutation(num_samples)] = ids[np.arange(num_samples) * len(ids) // num_samples]
    return client


def _shuffled_class_order(y: Indices, rng: np.random.Generator) -> Indices:
    """Returns the order that sorts samples by class, random within a class."""
    shuffled = rng.permutation(len(y))
    return shuffled[np.argsort(y[shuffled], kind="stable")]


def _assign_dirichlet(y: Indices, ids: Indices, alpha: float, request: _PartitionRequest, term: Term) -> Indices:
    """Returns a client for each sample. Client i gets a share p_i of each class, with p ~ Dirichlet(α, ..., α)."""
    sizes = np.bincount(y)
    counts = _dirichlet_counts(sizes, len(ids), term.require_positive("ALPHA", alpha), request, term)
    return _assign_by_counts(y, counts, ids, request.rng)


def _assign_by_counts(y: Indices, counts: Indices, ids: Indices, rng: np.random.Generator) -> Indices:
    """Returns a client for each sample, from the number of samples per class and client, [classes, clients]."""
    client = np.empty(len(y), dtype=np.int64)
    client[_shuffled_class_order(y, rng)] = np.repeat(np.tile(ids, len(counts)), counts.ravel())
    return client


def _equal_counts(sizes: Indices, num_clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """Returns the number of samples per class and client, with equal totals of all clients (Hsu et al. 2019).

    Clients draw one after the other, each from its own Dirichlet(α) over classes. A class that is used up is left out
    of later draws, so that the last clients get the remaining classes.
    """
    remaining, counts = sizes.copy(), np.zeros((num_clients, len(sizes)), dtype=np.int64)
    for i, prior in enumerate(rng.dirichlet(np.full(len(sizes), alpha), size=num_clients)):
        size = (remaining.sum() + num_clients - i - 1) // (num_clients - i)
        while num_missing := size - counts[i].sum():
            weights = np.where(remaining > 0, prior, 0.0)
            weights = weights if weights.sum() > 0 else remaining.astype(np.float64)
            taken = np.minimum(rng.multinomial(num_missing, weights / weights.sum()), remaining)
            counts[i] += taken
            remaining -= taken
    return counts.T


def _dirichlet_counts(
    sizes: Indices, num_clients: int, alpha: float, request: _PartitionRequest, term: Term
) -> Indices:
    """Returns the number of samples per class and client, drawn again until every client has enough samples."""
    for _ in range(_MAX_DRAWS):
        shares = request.rng.dirichlet(np.full(num_clients, alpha), size=len(sizes))
        ends = np.floor(shares.cumsum(axis=1) * sizes[:, None]).astype(np.int64)
        ends[:, -1] = sizes
        counts = np.diff(ends, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= request.min_samples:
            return counts
    raise UserError(
        f"partition '{term.name}:{term.argument}': in {_MAX_DRAWS} draws there was always a client with fewer "
        f"than {request.min_samples} samples. Ask for fewer clients, a larger ALPHA or {request.reduce_hint}."
    )


def _order_and_bounds(
    assignment: _Assignment, val_fraction: float, test_fraction: float, seed: int, is_sensitive: Tensor | None
) -> tuple[Indices, dict[str, Indices]]:
    """Returns the order of samples in the federation, and the bounds of its clients in each split."""
    rng = np.random.default_rng(derive_seed(seed, "splits"))
    shuffled = rng.permutation(np.flatnonzero(assignment.client_of_sample != _UNASSIGNED))
    by_client = shuffled[np.argsort(assignment.client_of_sample[shuffled], kind="stable")]
    num_samples = np.bincount(assignment.client_of_sample[by_client], minlength=len(assignment.client_ids))
    val, test = _split_sizes(num_samples, val_fraction), _split_sizes(num_samples, test_fraction)
    sizes = {"train": num_samples - val - test, "val": val, "test": test}
    if sizes["train"].min() < 1:
        raise UserError(
            f"val_fraction {val_fraction} and test_fraction {test_fraction} leave a client of {num_samples.min()} "
            "samples nothing to train on. Lower one of them, or ask for a larger --min-samples."
        )
    rank = np.arange(len(by_client)) - np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
    split = (rank >= np.repeat(sizes["train"], num_samples)).astype(np.int8) + (
        rank >= np.repeat(num_samples - test, num_samples)
    )
    sensitive_last = np.zeros(len(by_client)) if is_sensitive is None else is_sensitive.numpy()[by_client]
    order = by_client[np.lexsort((sensitive_last, assignment.client_of_sample[by_client], split))]
    ends = np.concatenate([[0], np.cumsum(np.concatenate([sizes[name] for name in SPLITS]))])
    n = len(num_samples)
    return order, {name: ends[s * n : (s + 1) * n + 1] for s, name in enumerate(SPLITS)}


def _count_sensitive(
    bounds: dict[str, Indices], order: Indices, is_sensitive: Tensor | None, sensitive_fraction: float
) -> dict[str, Indices]:
    """Returns the number of sensitive samples of each client, which are the last ones of a split.

    If the data set does not name them, the last samples are as good as any, because samples are in random order.
    """
    num_sensitive = {}
    for split in SPLITS_WITH_SENSITIVE:
        ends = bounds[split]
        if is_sensitive is None:
            num_sensitive[split] = num_sensitive_samples(np.diff(ends), sensitive_fraction)
        else:
            before = np.concatenate([[0], np.cumsum(is_sensitive.numpy()[order])])
            num_sensitive[split] = np.diff(before[ends])
    return num_sensitive


def _sensitive_note(is_sensitive: Tensor | None) -> str:
    return (
        ""
        if is_sensitive is None
        else f"{int(is_sensitive.sum()):,} of {len(is_sensitive):,} training samples are sensitive"
    )


def _split_sizes(num_samples: Indices, fraction: float) -> Indices:
    return np.maximum(1, np.rint(fraction * num_samples).astype(np.int64)) if fraction else np.zeros_like(num_samples)


def _combine_planted_groups(assignment: _Assignment, effects: Sequence[ShiftEffect]) -> dict[ClientId, int] | None:
    """Returns the planted group of each client. Several groupings give one group per combination that occurs."""
    groupings = [
        g for g in (assignment.planted_groups, *(effect.planted_groups for effect in effects)) if g is not None
    ]
    if not groupings:
        return None
    _, combination = np.unique(np.stack(groupings, axis=1), axis=0, return_inverse=True)
    return dict(zip(assignment.client_ids, combination.tolist(), strict=True))


def _describe_shifts(clients: Sequence[ClientId], effects: Sequence[ShiftEffect]) -> dict[ClientId, str]:
    """Returns a description of the shifts of each client that has one."""
    joined = (
        ", ".join(filter(None, parts)) for parts in zip(*(effect.descriptions for effect in effects), strict=True)
    )
    return {client: text for client, text in zip(clients, joined, strict=False) if text}


class _Base(NamedTuple):
    """A way to assign samples to clients."""

    assign: Callable[[_PartitionRequest, Term], _Assignment]
    example: str


BASES = {
    "iid": _Base(_iid, "iid"),
    "dirichlet": _Base(_dirichlet, "dirichlet:0.3"),
    "equal": _Base(_equal, "equal:0.3"),
    "groups": _Base(_groups, "groups:5,1.0"),
    "labels": _Base(_labels, "labels:0-2/3-5/6-9"),
    "shards": _Base(_shards, "shards:2"),
    "quantity": _Base(_quantity, "quantity:0.5"),
    "natural": _Base(_natural, "natural"),
}
