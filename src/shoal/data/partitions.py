"""Dealing the training rows of a data set to clients, and each client's rows to its splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.dataset import Dataset
from shoal.data.federation import DIVIDED, SENSITIVE, SPLITS, Federation, sensitive_rows
from shoal.data.partition_grammar import Term, parse
from shoal.data.prepare import set_aside
from shoal.data.shifts import SHIFTS, Effect, Target
from shoal.data.unseen import HoldOut
from shoal.errors import UserError
from shoal.rng import derive_seed
from shoal.types import ClientId, Examples

_DRAWS = 1000
_LEFT_OUT = -1

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _Request:
    dataset: Dataset
    rows: Indices  # of the training part, those that are dealt
    asked: int | None
    min_size: int
    rng: np.random.Generator
    held: frozenset[ClientId] = frozenset()  # owners that take part whoever else does: they are held out

    @property
    def y(self) -> Indices:
        return self.dataset.train.y.numpy()[self.rows]

    @property
    def smaller(self) -> str:
        """What may be lowered so that every client has rows enough."""
        public = len(self.dataset.train.y) - len(self.rows)
        return "a smaller --min-size" + (f" or --public, now {public}" if public else "")

    def clients(self, term: Term) -> int:
        """The number asked for, once it is known to be possible."""
        if self.asked is None:
            raise UserError(f"partition {term.name!r} needs the number of clients, as in --clients 100")
        if self.asked * self.min_size > len(self.rows):
            raise UserError(
                f"clients is {self.asked}, but {len(self.rows)} training rows are enough for "
                f"{len(self.rows) // self.min_size} with at least {self.min_size} each: "
                f"ask for fewer clients or {self.smaller}"
            )
        return self.asked


class _Deal(NamedTuple):
    client: Indices  # of each row that is dealt, or _LEFT_OUT
    clients: tuple[ClientId, ...]
    groups: Indices | None = None
    note: str = ""


def partition(
    dataset: Dataset,
    spec: str,
    *,
    clients: int | None = None,
    seed: int,
    min_size: int = 10,
    val_share: float = 0.1,
    test_share: float = 0.2,
    sensitive: float = SENSITIVE,
    public: int = 0,
    unseen: int | float = 0,
    device: torch.device | str = "cpu",
) -> Federation:
    """`spec` is one base and any number of shifts: `iid`, `dirichlet:0.3`, `groups:5,1+rotate:0,90`.

    Of each client's rows to train and to validate on, a share of `sensitive` is so, unless the data set says it of
    every row. As many training rows as `public` says are held by no client and not shifted: the server may use them.
    So many clients as `unseen` says, or such a share of them, are held out whole, by chance. Where rows have owners,
    none of theirs are public; a file's test part and scaling know nothing of them if `load` was told `unseen` too.
    """
    base, shifts = check_partition(spec)
    _check_shares(val_share, test_share, min_size)
    hold_out = HoldOut(unseen, seed, clients, min_size) if unseen else None
    held = _held_owners(dataset, hold_out) if base.name == "natural" else frozenset()
    apart = _set_apart(dataset, public, seed, held)
    rows_dealt = np.setdiff1d(np.arange(len(dataset.train.y)), apart)
    deal = _dealt(dataset, base, clients, seed, min_size, rows_dealt, held)
    order, bounds = _lay_out(deal, val_share, test_share, seed, dataset.sensitive)
    index = torch.from_numpy(order)
    rows = Examples(dataset.train.x[index], dataset.train.y[index])
    target = Target(
        rows=rows,
        client=torch.from_numpy(deal.client)[index],
        first_test_row=int(bounds["test"][0]),
        clients=len(deal.clients),
        classes=len(dataset.classes),
        seed=seed,
    )
    effects = [SHIFTS[term.name].apply(target, term) for term in shifts]
    federation = Federation(
        rows,
        bounds,
        deal.clients,
        central=dataset.test,
        classes=dataset.classes,
        name=dataset.name,
        spec=spec,
        note="; ".join(note for note in (dataset.note, deal.note, _said(dataset.sensitive), _told(public)) if note),
        shifts=_descriptions(deal.clients, effects),
        groups=_planted(deal, effects),
        sensitive=_sensitive(bounds, order, dataset.sensitive, sensitive),
        public=Examples(dataset.train.x[apart], dataset.train.y[apart]),
        edges=_edges(dataset, deal),
        preparation=dataset.preparation,
    )
    if hold_out is not None:
        federation = federation.holding_out(held & set(deal.clients) or hold_out.among(deal.clients))
    return federation if torch.device(device).type == "cpu" else federation.to(device)


def check_partition(spec: str) -> tuple[Term, list[Term]]:
    """The base and the shifts of a partition, if their names are known."""
    examples = ({name: entry.example for name, entry in known.items()} for known in (BASES, SHIFTS))
    return parse(spec, *examples)


def _edges(dataset: Dataset, deal: _Deal) -> dict[ClientId, str] | None:
    """Where each client is, as all of its rows say."""
    if dataset.edge is None:
        return None
    found: dict[ClientId, str] = {}
    for k, edge in zip(deal.client.tolist(), dataset.edge, strict=True):
        if k == _LEFT_OUT:
            continue
        client = deal.clients[k]
        if found.setdefault(client, edge) != edge:
            raise UserError(
                f"client {client!r} has rows under the edges {found[client]!r} and {edge!r}; it must be one"
            )
    return found


def _held_owners(dataset: Dataset, hold_out: HoldOut | None) -> frozenset[ClientId]:
    """As they were chosen when the data were read, else by what the data set says."""
    if hold_out is None:
        return frozenset()
    owner, owners = _owners(dataset)
    if not dataset.unseen:
        return hold_out.among_owners([owners[i] for i in owner.tolist()])
    if isinstance(hold_out.unseen, int) and hold_out.unseen != len(dataset.unseen):
        raise UserError(
            f"unseen is {hold_out.unseen}, but {dataset.name} was loaded with {len(dataset.unseen)} clients held out; "
            "it must be the same number"
        )
    return dataset.unseen


def client_names(count: int) -> tuple[ClientId, ...]:
    width = len(str(count - 1))
    return tuple(f"c{i:0{width}d}" for i in range(count))


def _check_shares(val_share: float, test_share: float, min_size: int) -> None:
    for name, share in (("val_share", val_share), ("test_share", test_share)):
        if not 0 <= share < 1:
            raise UserError(f"{name} is {share}, but it must be at least 0 and below 1")
    if val_share + test_share >= 1:
        raise UserError(f"val_share {val_share} and test_share {test_share} leave nothing to train on: lower one")
    least = 1 + (val_share > 0) + (test_share > 0)
    if min_size < least:
        raise UserError(f"min_size is {min_size}, but a client needs at least {least} rows, one for each split")


def _set_apart(dataset: Dataset, public: int, seed: int, held: frozenset[ClientId]) -> Indices:
    """The rows that no client will hold, by chance; none of them is known to be sensitive, or of who is held out."""
    rows = len(dataset.train.y)
    free = np.arange(rows) if dataset.sensitive is None else np.flatnonzero(~dataset.sensitive.numpy())
    if held and dataset.owner is not None:
        free = np.array([i for i in free.tolist() if dataset.owner[i] not in held], dtype=np.int64)
    most = min(len(free), rows - 1)
    if not 0 <= public <= most:
        raise UserError(f"public is {public}, but of the training rows of {dataset.name} 0 to {most} can be public")
    return free[set_aside(dataset.train.y.numpy()[free], public, derive_seed(seed, "public"))]


def _told(public: int) -> str:
    return f"{public:,} training rows are public" if public else ""


def _dealt(
    dataset: Dataset,
    base: Term,
    clients: int | None,
    seed: int,
    min_size: int,
    rows: Indices,
    held: frozenset[ClientId],
) -> _Deal:
    if clients is not None and clients < 1:
        raise UserError(f"clients is {clients}, but must be at least 1")
    rng = np.random.default_rng(derive_seed(seed, "partition", base.name))
    request = _Request(dataset, rows, clients, min_size, rng, held)
    deal = BASES[base.name].deal(request, base)
    dealt = deal.client[deal.client != _LEFT_OUT]
    smallest = int(np.bincount(dealt, minlength=len(deal.clients)).min())
    if smallest < min_size:
        raise UserError(
            f"partition {base.name!r} leaves a client with {smallest} rows, fewer than {min_size}: "
            f"ask for fewer clients or {request.smaller}"
        )
    client = np.full(len(dataset.train.y), _LEFT_OUT)
    client[rows] = deal.client
    return deal._replace(client=client)


def _iid(request: _Request, term: Term) -> _Deal:
    term.no_argument()
    clients = request.clients(term)
    return _Deal(_evenly(len(request.y), np.arange(clients), request.rng), client_names(clients))


def _dirichlet(request: _Request, term: Term) -> _Deal:
    (alpha,) = term.exactly("ALPHA")
    clients = request.clients(term)
    return _Deal(_skewed(request.y, np.arange(clients), alpha, request, term), client_names(clients))


def _equal(request: _Request, term: Term) -> _Deal:
    (alpha,) = term.exactly("ALPHA")
    clients = request.clients(term)
    counts = _equal_counts(np.bincount(request.y), clients, term.positive("ALPHA", alpha), request.rng)
    return _Deal(_to_clients(request.y, counts, np.arange(clients), request.rng), client_names(clients))


def _quantity(request: _Request, term: Term) -> _Deal:
    """As if all rows were of one class."""
    (alpha,) = term.exactly("ALPHA")
    clients = request.clients(term)
    one_class = np.zeros_like(request.y)
    return _Deal(_skewed(one_class, np.arange(clients), alpha, request, term), client_names(clients))


def _groups(request: _Request, term: Term) -> _Deal:
    count, alpha = term.exactly("RHO", "ALPHA")
    blocks = term.whole("RHO", count)
    classes = np.array_split(np.arange(len(request.dataset.classes)), blocks)
    return _in_blocks(classes, request, term, lambda y, ids: _skewed(y, ids, alpha, request, term))


def _labels(request: _Request, term: Term) -> _Deal:
    classes = _label_groups(term, len(request.dataset.classes))
    return _in_blocks(classes, request, term, lambda y, ids: _evenly(len(y), ids, request.rng))


def _in_blocks(
    classes: Sequence[Indices], request: _Request, term: Term, deal: Callable[[Indices, Indices], Indices]
) -> _Deal:
    """The rows of each group of classes to one contiguous block of clients, within which `deal` decides."""
    clients, blocks = request.clients(term), len(classes)
    most = min(clients, len(request.dataset.classes))
    if blocks > most:
        raise term.wrong(
            f"{blocks} groups cannot be made of {clients} clients and "
            f"{len(request.dataset.classes)} classes: {most} at most"
        )
    client, group = np.empty(len(request.y), dtype=np.int64), np.empty(clients, dtype=np.int64)
    for i, ids in enumerate(np.array_split(np.arange(clients), blocks)):
        rows = np.flatnonzero(np.isin(request.y, classes[i]))
        if len(rows) < len(ids) * request.min_size:
            raise term.wrong(
                f"group {i} has {len(rows)} rows, too few for {len(ids)} clients with at least {request.min_size} each"
            )
        client[rows] = deal(request.y[rows], ids)
        group[ids] = i
    return _Deal(client, client_names(clients), group)


def _label_groups(term: Term, classes: int) -> list[Indices]:
    """`0-2/3,5/4` as [[0, 1, 2], [3, 5], [4]], with every class in exactly one group."""
    try:
        groups = [[label for span in group.split(",") for label in _span(span)] for group in term.argument.split("/")]
    except ValueError as error:
        raise term.wrong("groups of class numbers need / between them") from error
    if sorted(label for group in groups for label in group) != list(range(classes)) or [] in groups:
        raise term.wrong(f"each of the classes 0 to {classes - 1} must be in exactly one group")
    return [np.array(group) for group in groups]


def _span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _shards(request: _Request, term: Term) -> _Deal:
    """Rows sorted by label, cut into K shards per client that differ by one row at most, dealt at random."""
    (count,) = term.exactly("K")
    clients, rows = request.clients(term), len(request.y)
    shards = term.whole("K", count) * clients
    if shards > rows:
        raise term.wrong(f"{shards} shards cannot be cut from {rows} rows")
    dealt = request.rng.permutation(shards) % clients
    client = np.empty(rows, dtype=np.int64)
    client[_by_class(request.y, request.rng)] = dealt[np.arange(rows) * shards // rows]
    return _Deal(client, client_names(clients))


def _natural(request: _Request, term: Term) -> _Deal:
    if term.argument not in ("", "drop"):
        raise term.wrong("nothing but drop may follow the colon")
    owner, owners = _owners(request.dataset)
    owner = owner[request.rows]
    large = np.bincount(owner, minlength=len(owners)) >= request.min_size
    small = int((~large).sum())
    if small == len(owners) or (small and term.argument != "drop"):
        raise UserError(
            f"partition 'natural': {small} of {len(owners)} clients have fewer than {request.min_size} rows: "
            f"ask for {request.smaller}, or leave them out with natural:drop"
        )
    sure = large & np.array([name in request.held for name in owners])
    chosen = _choice(np.flatnonzero(large & ~sure), np.flatnonzero(sure), request.asked, request.rng)
    renumbered = np.full(len(owners), _LEFT_OUT)
    renumbered[chosen] = np.arange(len(chosen))
    note = f"{small} of {len(owners)} clients left out: fewer than {request.min_size} rows" if small else ""
    return _Deal(renumbered[owner], tuple(owners[i] for i in chosen), note=note)


def _owners(dataset: Dataset) -> tuple[Indices, list[ClientId]]:
    """The position of each row's owner among the sorted owners."""
    if dataset.owner is None:
        raise UserError(
            f"partition 'natural': {dataset.name} does not say which client owns which row "
            "(own data say it with --client-column)"
        )
    owners = sorted(set(dataset.owner))
    position = {owner: i for i, owner in enumerate(owners)}
    return np.fromiter(map(position.__getitem__, dataset.owner), np.int64, len(dataset.owner)), owners


def _choice(candidates: Indices, sure: Indices, clients: int | None, rng: np.random.Generator) -> Indices:
    """Those who are sure to take part, and of the candidates as many as are wanted beside them."""
    if clients is None:
        return np.sort(np.concatenate([candidates, sure]))
    if clients > len(candidates) + len(sure):
        raise UserError(f"clients is {clients}, but only {len(candidates) + len(sure)} can take part: ask for fewer")
    return np.sort(np.concatenate([rng.choice(candidates, clients - len(sure), replace=False), sure]))


def _evenly(rows: int, ids: Indices, rng: np.random.Generator) -> Indices:
    """A client for each row, at random, in numbers that differ by one at most."""
    client = np.empty(rows, dtype=np.int64)
    client[rng.permutation(rows)] = ids[np.arange(rows) * len(ids) // rows]
    return client


def _by_class(y: Indices, rng: np.random.Generator) -> Indices:
    """The order that sorts rows by class, random within a class."""
    shuffled = rng.permutation(len(y))
    return shuffled[np.argsort(y[shuffled], kind="stable")]


def _skewed(y: Indices, ids: Indices, alpha: float, request: _Request, term: Term) -> Indices:
    """A client for each row: of every class, client i gets the share p_i with p ~ Dirichlet(α, ..., α)."""
    sizes = np.bincount(y)
    counts = _dirichlet_counts(sizes, len(ids), term.positive("ALPHA", alpha), request, term)
    return _to_clients(y, counts, ids, request.rng)


def _to_clients(y: Indices, counts: Indices, ids: Indices, rng: np.random.Generator) -> Indices:
    """A client for each row, by how many of each class [classes, clients] they are to have."""
    client = np.empty(len(y), dtype=np.int64)
    client[_by_class(y, rng)] = np.repeat(np.tile(ids, len(counts)), counts.ravel())
    return client


def _equal_counts(sizes: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """Rows per class and client, as many for everyone: client by client, each by a Dirichlet(α) of its own over classes
    (Hsu et al. 2019). A class that is used up is left out of later draws, so the last clients take what there is."""
    left, counts = sizes.copy(), np.zeros((clients, len(sizes)), dtype=np.int64)
    for i, prior in enumerate(rng.dirichlet(np.full(len(sizes), alpha), size=clients)):
        wanted = (left.sum() + clients - i - 1) // (clients - i)
        while short := wanted - counts[i].sum():
            here = np.where(left > 0, prior, 0.0)
            here = here if here.sum() > 0 else left.astype(np.float64)
            taken = np.minimum(rng.multinomial(short, here / here.sum()), left)
            counts[i] += taken
            left -= taken
    return counts.T


def _dirichlet_counts(sizes: Indices, clients: int, alpha: float, request: _Request, term: Term) -> Indices:
    """Rows per class and client, drawn until every client has enough."""
    for _ in range(_DRAWS):
        shares = request.rng.dirichlet(np.full(clients, alpha), size=len(sizes))
        ends = np.floor(shares.cumsum(axis=1) * sizes[:, None]).astype(np.int64)
        ends[:, -1] = sizes
        counts = np.diff(ends, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= request.min_size:
            return counts
    raise UserError(
        f"partition '{term.name}:{term.argument}': in {_DRAWS} draws there was always a client with fewer "
        f"than {request.min_size} rows: ask for fewer clients, a larger ALPHA or {request.smaller}"
    )


def _lay_out(
    deal: _Deal, val_share: float, test_share: float, seed: int, sensitive: Tensor | None
) -> tuple[Indices, dict[str, Indices]]:
    """The order of rows that a federation has, and the bounds of its clients in each split."""
    rng = np.random.default_rng(derive_seed(seed, "splits"))
    shuffled = rng.permutation(np.flatnonzero(deal.client != _LEFT_OUT))
    by_client = shuffled[np.argsort(deal.client[shuffled], kind="stable")]
    held = np.bincount(deal.client[by_client], minlength=len(deal.clients))
    val, test = _share_of(held, val_share), _share_of(held, test_share)
    sizes = {"train": held - val - test, "val": val, "test": test}
    if sizes["train"].min() < 1:
        raise UserError(
            f"val_share {val_share} and test_share {test_share} leave a client of {held.min()} rows nothing "
            "to train on: lower one, or ask for a larger --min-size"
        )
    rank = np.arange(len(by_client)) - np.repeat(np.cumsum(held) - held, held)
    split = (rank >= np.repeat(sizes["train"], held)).astype(np.int8) + (rank >= np.repeat(held - test, held))
    last = np.zeros(len(by_client)) if sensitive is None else sensitive.numpy()[by_client]
    order = by_client[np.lexsort((last, deal.client[by_client], split))]
    ends = np.concatenate([[0], np.cumsum(np.concatenate([sizes[name] for name in SPLITS]))])
    n = len(held)
    return order, {name: ends[s * n : (s + 1) * n + 1] for s, name in enumerate(SPLITS)}


def _sensitive(bounds: dict[str, Indices], order: Indices, said: Tensor | None, share: float) -> dict[str, Indices]:
    """Sensitive rows of each client. They come last where the data set says which they are; else the last ones are
    taken, for rows are in random order."""
    found = {}
    for split in DIVIDED:
        ends = bounds[split]
        if said is None:
            found[split] = sensitive_rows(np.diff(ends), share)
        else:
            before = np.concatenate([[0], np.cumsum(said.numpy()[order])])
            found[split] = np.diff(before[ends])
    return found


def _said(sensitive: Tensor | None) -> str:
    return "" if sensitive is None else f"{int(sensitive.sum()):,} of {len(sensitive):,} training rows are sensitive"


def _share_of(held: Indices, share: float) -> Indices:
    return np.maximum(1, np.rint(share * held).astype(np.int64)) if share else np.zeros_like(held)


def _planted(deal: _Deal, effects: Sequence[Effect]) -> dict[ClientId, int] | None:
    """Where several groupings meet, a group for each combination that occurs."""
    groupings = [g for g in (deal.groups, *(effect.groups for effect in effects)) if g is not None]
    if not groupings:
        return None
    _, group = np.unique(np.stack(groupings, axis=1), axis=0, return_inverse=True)
    return dict(zip(deal.clients, group.tolist(), strict=True))


def _descriptions(clients: Sequence[ClientId], effects: Sequence[Effect]) -> dict[ClientId, str]:
    """What was done to each client to whom anything was done."""
    joined = (", ".join(filter(None, done)) for done in zip(*(effect.done for effect in effects), strict=True))
    return {client: text for client, text in zip(clients, joined, strict=False) if text}


class _Base(NamedTuple):
    deal: Callable[[_Request, Term], _Deal]
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
