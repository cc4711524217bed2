"""The data of all clients in one tensor, of which every split of a client is a view."""

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
from shoal.types import CENTRALISED_CLIENT, ClientData, ClientId, Samples

SPLITS = ("train", "val", "test")
SPLITS_WITH_SENSITIVE = ("train", "val")  # divided into samples of low and of high sensitivity
DEFAULT_SENSITIVE_FRACTION = 0.3  # of a client's samples that have high sensitivity


class _ClientSplits(Mapping[str, Samples]):
    """The samples of one client by split. A view is created when a split is read."""

    def __init__(self, samples: Samples, spans: Mapping[str, slice]) -> None:
        self._samples, self._spans = samples, spans

    def __getitem__(self, split: str) -> Samples:
        span = self._spans[split]
        return Samples(self._samples.x[span], self._samples.y[span])

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


class Federation(Mapping[ClientId, ClientData]):
    """The clients of an experiment with their data: a mapping from a client to its splits.

    `CENTRALISED_CLIENT` is a key too, with the samples of all clients and without a sensitive part. It is neither
    counted nor iterated.

    Parameters
    ----------
    samples : Samples
        All samples of all clients, split by split, and client by client within a split.
    bounds : Mapping[str, ndarray]
        For each split, the bounds of the clients: client i has samples bounds[i] to bounds[i + 1].
    clients : tuple of ClientId
        The clients in the order of their samples.
    central : Samples
        The central test set.
    classes : tuple of str
        Names of the classes.
    name, partition, note : str
        Name of the data set, text of the partition, and remarks for the user.
    preparation : Preparation or None
        How raw values were scaled; None if they were not.
    shifts : Mapping[ClientId, str] or None
        Description of the data transformation of each client that has one.
    planted_groups : Mapping[ClientId, int] or None
        The planted group of each client, if the partition has groups.
    num_sensitive : Mapping[str, ndarray] or None
        For "train" and "val", how many samples of each client are sensitive. These are the last ones of the split.
    public_samples : Samples or None
        Labelled samples that no client has and that the server may use.
    edge_of_client : Mapping[ClientId, str] or None
        The edge server of each client, if the data name it.
    unseen : Mapping[ClientId, Samples] or None
        The unseen clients with all their samples. They are not clients of the federation, and only evaluation uses
        them.
    """

    def __init__(
        self,
        samples: Samples,
        bounds: Mapping[str, NDArray[np.int64]],
        clients: tuple[ClientId, ...],
        *,
        central: Samples,
        classes: tuple[str, ...],
        name: str = "",
        partition: str = "",
        note: str = "",
        preparation: Preparation | None = None,
        shifts: Mapping[ClientId, str] | None = None,
        planted_groups: Mapping[ClientId, int] | None = None,
        num_sensitive: Mapping[str, NDArray[np.int64]] | None = None,
        public_samples: Samples | None = None,
        edge_of_client: Mapping[ClientId, str] | None = None,
        unseen: Mapping[ClientId, Samples] | None = None,
    ) -> None:
        self.unseen = {c: _channels_last(samples_of_client) for c, samples_of_client in (unseen or {}).items()}
        self.central = _channels_last(central)
        self.public_samples = (
            _channels_last(public_samples) if public_samples is not None and len(public_samples.y) else None
        )
        self.classes = classes
        self.name = name
        self.partition = partition
        self.note = note
        self.preparation = preparation
        self.shifts: dict[ClientId, str] = dict(shifts or {})
        self.planted_groups: dict[ClientId, int] | None = None if planted_groups is None else dict(planted_groups)
        self.edge_of_client: dict[ClientId, str] | None = None if edge_of_client is None else dict(edge_of_client)
        self._samples = _channels_last(samples)
        self._bounds = {split: bounds[split].tolist() for split in SPLITS}
        self._num_sensitive = {split: counts.tolist() for split, counts in (num_sensitive or {}).items()}
        self._clients = clients
        self._index_of_client = {client: i for i, client in enumerate(clients)}
        if CENTRALISED_CLIENT in self._index_of_client or len(self._index_of_client) != len(clients):
            raise UserError(f"client names must differ from each other and from {CENTRALISED_CLIENT!r}.")

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[ClientId, Mapping[str, Samples]],
        central: Samples,
        classes: tuple[str, ...],
        *,
        name: str = "own",
        note: str = "",
        sensitive_fraction: float = DEFAULT_SENSITIVE_FRACTION,
        public_samples: tuple[Tensor, Tensor] | None = None,
        edge_of_client: Mapping[ClientId, str] | None = None,
    ) -> Self:
        """Creates a federation from tensors.

        Parameters
        ----------
        clients : Mapping[ClientId, Mapping[str, Samples]]
            The splits "train", "val" and "test" of each client. A missing split is empty, but "train" must have a
            sample. Sensitive samples are given separately, as "train/high" and "val/high".
        central : Samples
            The central test set.
        classes : tuple of str
            Names of the classes.
        name, note : str
            Name of the data set, and remarks for the user.
        sensitive_fraction : float
            Fraction of "train" and "val" that is sensitive if no client has "train/high" or "val/high". These are the
            last samples of a split, so shuffle the samples first if they are sorted.
        public_samples : tuple of two tensors, or None
            Inputs and labels of samples that no client has and that the server may use.
        edge_of_client : Mapping[ClientId, str] or None
            The edge server of each client.

        Returns
        -------
        Federation
            The federation.

        Raises
        ------
        UserError
            If there is no client, or the tensors of a split do not fit `central` and `classes`.
        """
        if not clients:
            raise UserError("clients is empty; a federation needs at least one client.")
        if len(central.y) and not 0 <= int(central.y.min()) <= int(central.y.max()) < len(classes):
            raise UserError(f"central: labels must lie between 0 and {len(classes) - 1}, one for each class.")
        for client, splits in clients.items():
            _check_client(client, splits, central, len(classes))
        server_samples = None if public_samples is None else Samples(*public_samples)
        if server_samples is not None:
            _check_samples("public_samples", server_samples, central, len(classes))
        empty = Samples(central.x[:0], central.y[:0])
        parts = [_join_sensitive_last(data, split, empty) for split in SPLITS for data in clients.values()]
        ends = [0, *accumulate(len(part.y) for part in parts)]
        samples = Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        n = len(clients)
        bounds = {split: np.array(ends[s * n : (s + 1) * n + 1]) for s, split in enumerate(SPLITS)}
        num_sensitive = {
            split: num_sensitive_samples(np.diff(bounds[split]), sensitive_fraction) for split in SPLITS_WITH_SENSITIVE
        }
        if any(f"{split}/high" in data for data in clients.values() for split in SPLITS_WITH_SENSITIVE):
            num_sensitive = {
                s: np.array([len(d.get(f"{s}/high", empty).y) for d in clients.values()]) for s in SPLITS_WITH_SENSITIVE
            }
        return cls(
            samples,
            bounds,
            tuple(clients),
            central=central,
            classes=classes,
            name=name,
            note=note,
            num_sensitive=num_sensitive,
            public_samples=server_samples,
            edge_of_client=edge_of_client,
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self._samples.x.shape[1:])

    def __getitem__(self, client: ClientId) -> ClientData:
        if client == CENTRALISED_CLIENT:
            first, last = 0, len(self._clients)
        else:
            first = self._index_of_client[client]
            last = first + 1
        spans = {split: slice(bounds[first], bounds[last]) for split, bounds in self._bounds.items()}
        if client != CENTRALISED_CLIENT:
            for split, high in self._num_sensitive.items():
                begin, end = spans[split].start, spans[split].stop
                first_sensitive = end - high[first]
                spans |= {f"{split}/low": slice(begin, first_sensitive), f"{split}/high": slice(first_sensitive, end)}
        return _ClientSplits(self._samples, spans)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: object) -> bool:
        return client in self._index_of_client

    def samples_per_client(self, split: str) -> Tensor:
        """Returns the number of samples of each client in this split."""
        return torch.tensor(self._bounds[split]).diff()

    def label_counts(self) -> Tensor:
        """Returns the number of samples per client and class over all splits, [clients, classes]."""
        indices = torch.arange(len(self._clients))
        client = torch.cat([indices.repeat_interleave(self.samples_per_client(split)) for split in SPLITS])
        cell = client * len(self.classes) + self._samples.y.cpu()
        return cell.bincount(minlength=len(self._clients) * len(self.classes)).view(-1, len(self.classes))

    def hold_out(self, unseen: Collection[ClientId]) -> Federation:
        """Returns the federation without these clients, which become unseen clients with the samples of all splits."""
        kept_indices = [i for i, client in enumerate(self._clients) if client not in unseen]
        spans = [slice(*self._bounds[split][i : i + 2]) for split in SPLITS for i in kept_indices]
        n, ends = len(kept_indices), np.array([0, *accumulate(span.stop - span.start for span in spans)])
        clients = tuple(self._clients[i] for i in kept_indices)
        unseen_splits = {c: [self[c][split] for split in SPLITS] for c in self._clients if c in unseen}
        return Federation(
            Samples(*(torch.cat([part[span] for span in spans]) for part in self._samples)),
            {split: ends[s * n : (s + 1) * n + 1] for s, split in enumerate(SPLITS)},
            clients,
            central=self.central,
            classes=self.classes,
            name=self.name,
            partition=self.partition,
            note=self.note,
            shifts={c: text for c, text in self.shifts.items() if c in clients},
            planted_groups=None if self.planted_groups is None else {c: self.planted_groups[c] for c in clients},
            num_sensitive={split: np.array(counts)[kept_indices] for split, counts in self._num_sensitive.items()},
            public_samples=self.public_samples,
            edge_of_client=None if self.edge_of_client is None else {c: self.edge_of_client[c] for c in clients},
            preparation=self.preparation,
            unseen={c: Samples(*map(torch.cat, zip(*parts, strict=True))) for c, parts in unseen_splits.items()},
        )

    def to(self, device: torch.device | str) -> Federation:
        """Returns the federation with all samples on the device."""
        return Federation(
            Samples(*(part.to(device) for part in self._samples)),
            {split: np.array(bounds) for split, bounds in self._bounds.items()},
            self._clients,
            unseen={c: Samples(*(part.to(device) for part in samples)) for c, samples in self.unseen.items()},
            central=Samples(*(part.to(device) for part in self.central)),
            classes=self.classes,
            name=self.name,
            partition=self.partition,
            note=self.note,
            shifts=self.shifts,
            planted_groups=self.planted_groups,
            num_sensitive={split: np.array(counts) for split, counts in self._num_sensitive.items()},
            public_samples=None
            if self.public_samples is None
            else Samples(*(part.to(device) for part in self.public_samples)),
            edge_of_client=self.edge_of_client,
            preparation=self.preparation,
        )


def _join_sensitive_last(data: Mapping[str, Samples], split: str, empty: Samples) -> Samples:
    """Returns the samples of a split, the sensitive ones last."""
    low, high = data.get(split, empty), data.get(f"{split}/high", empty)
    return Samples(torch.cat([low.x, high.x]), torch.cat([low.y, high.y]))


def num_sensitive_samples(num_samples: NDArray[np.int64], sensitive_fraction: float) -> NDArray[np.int64]:
    """Returns how many samples of each client are sensitive. At least one is not, so that every client can train."""
    return np.minimum(np.rint(sensitive_fraction * num_samples), np.maximum(num_samples - 1, 0)).astype(np.int64)


def _channels_last(samples: Samples) -> Samples:
    """Returns images with their channels last in memory, which makes convolutions on a CPU about 1.4 times faster."""
    if samples.x.dim() != 4:
        return samples
    return Samples(samples.x.contiguous(memory_format=torch.channels_last), samples.y)


def _check_client(client: ClientId, splits: Mapping[str, Samples], central: Samples, num_classes: int) -> None:
    allowed = (*SPLITS, *(f"{split}/high" for split in SPLITS_WITH_SENSITIVE))
    unknown = set(splits) - set(allowed)
    if unknown:
        raise UserError(f"client {client}: split {min(unknown)!r} must be one of {', '.join(allowed)}.")
    if not any(len(splits[split].y) for split in ("train", "train/high") if split in splits):
        raise UserError(f"client {client}: the split 'train' must have at least one sample.")
    for split, samples in splits.items():
        _check_samples(f"client {client}: the split {split!r}", samples, central, num_classes)


def _check_samples(where: str, samples: Samples, central: Samples, num_classes: int) -> None:
    x, y = samples
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} samples but {len(y)} labels.")
    if x.shape[1:] != central.x.shape[1:] or x.dtype != central.x.dtype:
        raise UserError(
            f"{where} has samples of shape {tuple(x.shape[1:])} and {x.dtype}, "
            f"but the central test set has {tuple(central.x.shape[1:])} and {central.x.dtype}."
        )
    if y.dtype != torch.int64 or (len(y) and (y.min() < 0 or y.max() >= num_classes)):
        raise UserError(f"{where} has labels of {y.dtype} that are not all int64 in 0..{num_classes - 1}.")
