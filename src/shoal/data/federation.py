"""Many clients' data, laid out once: every client's split is a view of one tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.prepare import Preparation
from shoal.errors import UserError
from shoal.types import CENTRALISED_CLIENT, ClientData, ClientId, Examples

SPLITS = ("train", "val", "test")
DIVIDED = ("train", "val")  # into rows of low and of high sensitivity
SENSITIVE = 0.3  # the share of a client's rows that are of high sensitivity, where nothing else is said


class _Splits(Mapping[str, Examples]):
    """One client's rows, cut when they are asked for."""

    def __init__(self, rows: Examples, spans: Mapping[str, slice]) -> None:
        self._rows, self._spans = rows, spans

    def __getitem__(self, split: str) -> Examples:
        span = self._spans[split]
        return Examples(self._rows.x[span], self._rows.y[span])

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


class Federation(Mapping[ClientId, ClientData]):
    """Rows lie split by split, and within a split client by client.

    `bounds[split]` has one entry more than there are clients: client i holds rows bounds[i] to bounds[i + 1]. The last
    of these are its sensitive ones in "train" and "val": as many as `sensitive[split]` says.
    `POOL` is a key too, the union of all clients, but is neither counted nor iterated; it has no sensitive part.
    `public` are labelled rows that no client holds and the server may use, if there are any. `edges` names the edge
    that each client is under, where it is known. `unseen` are clients that are held out, each with all of its rows:
    they are no clients of the federation, and only evaluation meets them.
    """

    def __init__(
        self,
        rows: Examples,
        bounds: Mapping[str, NDArray[np.int64]],
        clients: tuple[ClientId, ...],
        *,
        central: Examples,
        classes: tuple[str, ...],
        name: str = "",
        spec: str = "",
        note: str = "",
        preparation: Preparation | None = None,
        shifts: Mapping[ClientId, str] | None = None,
        groups: Mapping[ClientId, int] | None = None,
        sensitive: Mapping[str, NDArray[np.int64]] | None = None,
        public: Examples | None = None,
        edges: Mapping[ClientId, str] | None = None,
        unseen: Mapping[ClientId, Examples] | None = None,
    ) -> None:
        self.unseen = {c: _laid_out(held) for c, held in (unseen or {}).items()}
        self.central = _laid_out(central)
        self.public = _laid_out(public) if public is not None and len(public.y) else None
        self.classes = classes
        self.name = name
        self.spec = spec
        self.note = note
        self.preparation = preparation
        self.shifts: dict[ClientId, str] = dict(shifts or {})
        self.groups: dict[ClientId, int] | None = None if groups is None else dict(groups)
        self.edges: dict[ClientId, str] | None = None if edges is None else dict(edges)
        self._rows = _laid_out(rows)
        self._bounds = {split: bounds[split].tolist() for split in SPLITS}
        self._sensitive = {split: rows.tolist() for split, rows in (sensitive or {}).items()}
        self._clients = clients
        self._position = {client: i for i, client in enumerate(clients)}
        if CENTRALISED_CLIENT in self._position or len(self._position) != len(clients):
            raise UserError(f"client names must differ from each other and from {CENTRALISED_CLIENT!r}")

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[ClientId, Mapping[str, Examples]],
        central: Examples,
        classes: tuple[str, ...],
        *,
        name: str = "own",
        note: str = "",
        sensitive: float = SENSITIVE,
        public: tuple[Tensor, Tensor] | None = None,
        edges: Mapping[ClientId, str] | None = None,
    ) -> Self:
        """From tensors of one's own. A split that a client lacks is empty; "train" must hold a row. Sensitive rows are
        given apart, as "train/high" and "val/high"; if nobody has any, they are the last ones of "train" and "val", a
        share of `sensitive`: shuffle rows first if they are sorted."""
        if not clients:
            raise UserError("clients is empty; a federation needs at least one client")
        if len(central.y) and not 0 <= int(central.y.min()) <= int(central.y.max()) < len(classes):
            raise UserError(f"central: labels must lie between 0 and {len(classes) - 1}, one for each class")
        for client, splits in clients.items():
            _check_client(client, splits, central, len(classes))
        held_by_none = None if public is None else Examples(*public)
        if held_by_none is not None:
            _check_rows("public", held_by_none, central, len(classes))
        none = Examples(central.x[:0], central.y[:0])
        parts = [_whole(data, split, none) for split in SPLITS for data in clients.values()]
        ends = [0, *accumulate(len(part.y) for part in parts)]
        rows = Examples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        n = len(clients)
        bounds = {split: np.array(ends[s * n : (s + 1) * n + 1]) for s, split in enumerate(SPLITS)}
        high = {split: sensitive_rows(np.diff(bounds[split]), sensitive) for split in DIVIDED}
        if any(f"{split}/high" in data for data in clients.values() for split in DIVIDED):
            high = {s: np.array([len(d.get(f"{s}/high", none).y) for d in clients.values()]) for s in DIVIDED}
        return cls(
            rows,
            bounds,
            tuple(clients),
            central=central,
            classes=classes,
            name=name,
            note=note,
            sensitive=high,
            public=held_by_none,
            edges=edges,
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self._rows.x.shape[1:])

    def __getitem__(self, client: ClientId) -> ClientData:
        if client == CENTRALISED_CLIENT:
            first, last = 0, len(self._clients)
        else:
            first = self._position[client]
            last = first + 1
        spans = {split: slice(bounds[first], bounds[last]) for split, bounds in self._bounds.items()}
        if client != CENTRALISED_CLIENT:
            for split, high in self._sensitive.items():
                begin, end = spans[split].start, spans[split].stop
                between = end - high[first]
                spans |= {f"{split}/low": slice(begin, between), f"{split}/high": slice(between, end)}
        return _Splits(self._rows, spans)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: object) -> bool:
        return client in self._position

    def sizes(self, split: str) -> Tensor:
        """Rows per client."""
        return torch.tensor(self._bounds[split]).diff()

    def counts(self) -> Tensor:
        """Rows per client and class, over all splits."""
        every = torch.arange(len(self._clients))
        client = torch.cat([every.repeat_interleave(self.sizes(split)) for split in SPLITS])
        cell = client * len(self.classes) + self._rows.y.cpu()
        return cell.bincount(minlength=len(self._clients) * len(self.classes)).view(-1, len(self.classes))

    def holding_out(self, unseen: Collection[ClientId]) -> Federation:
        """The same clients but these, of whom all rows, whatever their split, are kept apart."""
        kept = [i for i, client in enumerate(self._clients) if client not in unseen]
        spans = [slice(*self._bounds[split][i : i + 2]) for split in SPLITS for i in kept]
        n, ends = len(kept), np.array([0, *accumulate(span.stop - span.start for span in spans)])
        clients = tuple(self._clients[i] for i in kept)
        apart = {c: [self[c][split] for split in SPLITS] for c in self._clients if c in unseen}
        return Federation(
            Examples(*(torch.cat([part[span] for span in spans]) for part in self._rows)),
            {split: ends[s * n : (s + 1) * n + 1] for s, split in enumerate(SPLITS)},
            clients,
            central=self.central,
            classes=self.classes,
            name=self.name,
            spec=self.spec,
            note=self.note,
            shifts={c: text for c, text in self.shifts.items() if c in clients},
            groups=None if self.groups is None else {c: self.groups[c] for c in clients},
            sensitive={split: np.array(rows)[kept] for split, rows in self._sensitive.items()},
            public=self.public,
            edges=None if self.edges is None else {c: self.edges[c] for c in clients},
            preparation=self.preparation,
            unseen={c: Examples(*map(torch.cat, zip(*parts, strict=True))) for c, parts in apart.items()},
        )

    def to(self, device: torch.device | str) -> Federation:
        return Federation(
            Examples(*(part.to(device) for part in self._rows)),
            {split: np.array(bounds) for split, bounds in self._bounds.items()},
            self._clients,
            unseen={c: Examples(*(part.to(device) for part in held)) for c, held in self.unseen.items()},
            central=Examples(*(part.to(device) for part in self.central)),
            classes=self.classes,
            name=self.name,
            spec=self.spec,
            note=self.note,
            shifts=self.shifts,
            groups=self.groups,
            sensitive={split: np.array(rows) for split, rows in self._sensitive.items()},
            public=None if self.public is None else Examples(*(part.to(device) for part in self.public)),
            edges=self.edges,
            preparation=self.preparation,
        )


def _whole(data: Mapping[str, Examples], split: str, none: Examples) -> Examples:
    """The sensitive rows of a split last."""
    low, high = data.get(split, none), data.get(f"{split}/high", none)
    return Examples(torch.cat([low.x, high.x]), torch.cat([low.y, high.y]))


def sensitive_rows(held: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """How many of each client's rows are sensitive. One row at least is not, so that everybody can take part."""
    return np.minimum(np.rint(share * held), np.maximum(held - 1, 0)).astype(np.int64)


def _laid_out(rows: Examples) -> Examples:
    """Images with their channels last in memory: convolutions on a CPU are about 1.4 times faster that way."""
    if rows.x.dim() != 4:
        return rows
    return Examples(rows.x.contiguous(memory_format=torch.channels_last), rows.y)


def _check_client(client: ClientId, splits: Mapping[str, Examples], central: Examples, classes: int) -> None:
    known = (*SPLITS, *(f"{split}/high" for split in DIVIDED))
    unknown = set(splits) - set(known)
    if unknown:
        raise UserError(f"client {client}: split {min(unknown)!r} must be one of {', '.join(known)}")
    if not any(len(splits[split].y) for split in ("train", "train/high") if split in splits):
        raise UserError(f"client {client}: the split 'train' must hold at least one row")
    for split, rows in splits.items():
        _check_rows(f"client {client}: the split {split!r}", rows, central, classes)


def _check_rows(where: str, rows: Examples, central: Examples, classes: int) -> None:
    x, y = rows
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} rows but {len(y)} labels")
    if x.shape[1:] != central.x.shape[1:] or x.dtype != central.x.dtype:
        raise UserError(
            f"{where} has rows of shape {tuple(x.shape[1:])} and {x.dtype}, "
            f"but the central test part has {tuple(central.x.shape[1:])} and {central.x.dtype}"
        )
    if y.dtype != torch.int64 or (len(y) and (y.min() < 0 or y.max() >= classes)):
        raise UserError(f"{where} has labels of {y.dtype} that are not all int64 in 0..{classes - 1}")
