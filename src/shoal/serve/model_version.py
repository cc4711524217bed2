"""What is served after one round of a run: never changed, only replaced by a newer one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import tree
from shoal.codec import pack
from shoal.errors import UserError
from shoal.fleet.plain import run_program
from shoal.models.model import is_stackable
from shoal.serve.blueprint import Blueprint
from shoal.serve.predictions import Answered, Lot, answered, etag_of, worded
from shoal.types import LABEL_COUNTS, UNLABELLED_SPLIT, ClientId, Params, Samples, ServerState, Task, Tree

SERVED = "served"  # the name under which all that answers is fetched together


class Asked(NamedTuple):
    x: Tensor  # prepared rows
    client: ClientId | None = None
    counts: tuple[float, ...] | None = None  # how often each class occurs with whoever asks, if it knows

    @property
    def private(self) -> Tree:
        return {} if self.counts is None else {LABEL_COUNTS: torch.tensor(self.counts)}


class Told(NamedTuple):
    round: int  # after which the models were that answered
    said: Answered


class _Curious(Tree):
    """An empty private tree that notices whether it is looked into."""

    looked = False

    def __contains__(self, key: object) -> bool:
        self.looked = True
        return False

    def get(self, key: str, default: Any = None) -> Any:
        self.looked = True
        return default

    def __getitem__(self, key: str) -> Any:
        self.looked = True
        raise KeyError(key)


class NeedsPrivate(UserError):
    """What a client would be served depends on what it keeps to itself."""


class Version:
    def __init__(self, blueprint: Blueprint, state: ServerState) -> None:
        self.blueprint, self.method, self.state = blueprint, blueprint.method, state
        self.round = state.round
        self._unseen = self._lot(None)
        self._stacks = is_stackable(blueprint.model)
        self.lot = lru_cache(maxsize=256)(self._lot_of)  # some methods mix a client's model when it is asked for
        self.file = lru_cache(maxsize=4)(self._file)
        self.needs_private = self._looks_into_private()  # and a first answer, before anybody waits for one

    def _looks_into_private(self) -> bool:
        private = _Curious()
        x = torch.zeros(1, *self.blueprint.inputs.shape)
        with torch.no_grad():
            answered(self.method, self._unseen, x, private)
        return private.looked

    def _lot_of(self, client: ClientId | None) -> Lot:
        if client is None:
            return self._unseen
        if self.needs_private:
            raise NeedsPrivate(
                f"client is {client!r}, but method {self.method.name} predicts with what clients keep to themselves, "
                "which is not here; leave client out to be served as one that never trained"
            )
        return self._lot(client)

    def _lot(self, client: ClientId | None) -> Lot:
        models = self.method.models_for(self.state, client)
        only = next(iter(models.values())) if len(models) == 1 and self.state.membership else None
        return Lot(models, next((name for name, m in self.state.models.items() if m is only), None))

    def answer(self, asked: Sequence[Asked]) -> list[Told]:
        """All at once: rows that are served the same models together, and different ones stacked if they can be."""
        lots = [self.lot(a.client) for a in asked]
        places: dict[tuple[Any, ...], list[int]] = {}
        for i, lot in enumerate(lots):
            places.setdefault((lot.key, asked[i].counts), []).append(i)
        together = [
            (lots[inside[0]], torch.cat([asked[i].x for i in inside]), asked[inside[0]].private)
            for inside in places.values()
        ]
        with torch.no_grad():
            said = self._said(together)
        found: dict[int, Told] = {}
        for inside, whole in zip(places.values(), said, strict=True):
            start = 0
            for i in inside:
                rows = slice(start, start + len(asked[i].x))
                found[i] = Told(self.round, whole.part(rows))
                start = rows.stop
        return [found[i] for i in range(len(asked))]

    def prior(self, x: Tensor) -> Tensor | None:
        """What an unseen client's inputs say of how often its classes occur, if anything: it runs what it would run
        itself."""
        assert self.method.adaptation_program is not None
        data = {UNLABELLED_SPLIT: Samples(x, torch.zeros(len(x), dtype=torch.int64))}
        _, kept = run_program(self.method.adaptation_program, Task(self._unseen.models), data, {})
        return kept[LABEL_COUNTS] if kept is not None and bool(kept[LABEL_COUNTS].any()) else None

    def _said(self, together: Sequence[tuple[Lot, Tensor, Tree]]) -> list[Answered]:
        if self._stackable(together):
            return self._stacked([(lot, x) for lot, x, _ in together])
        return [answered(self.method, lot, x, private) for lot, x, private in together]

    def _stackable(self, together: Sequence[tuple[Lot, Tensor, Tree]]) -> bool:
        if len(together) < 2 or not self._stacks or self.method.predict_routed is not None:
            return False
        shapes = {tree.signature(lot.models) for lot, _, _ in together}
        return len(shapes) == 1 and not any(private for _, _, private in together)

    def _stacked(self, together: Sequence[tuple[Lot, Tensor]]) -> list[Answered]:
        """Models of one shape in one pass: [models, rows, ...], with rows of zeros where others have more."""
        most = max(len(x) for _, x in together)
        x = torch.stack([torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) for _, x in together])
        models = tree.map_leaves(lambda *leaves: torch.stack(leaves), *(lot.models for lot, _ in together))
        logits = torch.func.vmap(lambda m, rows: self.method.predict(m, {}, rows))(models, x)
        return [worded(lot, found[: len(x)]) for (lot, x), found in zip(together, logits, strict=True)]

    @property
    def ids(self) -> list[str]:
        return [SERVED, *sorted(self.state.models)]

    def models(self, name: str, client: ClientId | None = None) -> Mapping[str, Params]:
        return self.lot(client).models if name == SERVED else {name: self.state.models[name]}

    def facts(self, name: str, client: ClientId | None = None) -> dict[str, Any]:
        """What goes with a file, for whoever answers with it elsewhere."""
        expert = self.lot(client).expert if name == SERVED else name
        return self.blueprint.facts() | {"expert": expert, "round": self.round}

    def _file(self, name: str, client: ClientId | None = None) -> tuple[bytes, str]:
        """As safetensors, and an ETag."""
        data = pack(self.models(name, client), self.facts(name, client))
        return data, etag_of(data)
