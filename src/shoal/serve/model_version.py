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
from shoal.serve.predictions import Predictions, ServedModels, compute_etag, predict_rows, to_predictions
from shoal.types import LABEL_COUNTS, UNLABELLED_SPLIT, ClientId, Params, Samples, ServerState, Task, Tree

SERVING_MODEL = "served"  # the name under which all that answers is fetched together


class PredictRequest(NamedTuple):
    x: Tensor  # prepared rows
    client: ClientId | None = None
    label_counts: tuple[float, ...] | None = None  # how often each class occurs with whoever asks, if it knows

    @property
    def private_state(self) -> Tree:
        return {} if self.label_counts is None else {LABEL_COUNTS: torch.tensor(self.label_counts)}


class PredictResult(NamedTuple):
    round: int  # after which the models were that answered
    predictions: Predictions


class _AccessRecorder(Tree):
    """An empty private tree that notices whether it is looked into."""

    has_been_read = False

    def __contains__(self, key: object) -> bool:
        self.has_been_read = True
        return False

    def get(self, key: str, default: Any = None) -> Any:
        self.has_been_read = True
        return default

    def __getitem__(self, key: str) -> Any:
        self.has_been_read = True
        raise KeyError(key)


class NeedsPrivateState(UserError):
    """What a client would be served depends on what it keeps to itself."""


class ModelVersion:
    def __init__(self, blueprint: Blueprint, state: ServerState) -> None:
        self.blueprint, self.method, self.state = blueprint, blueprint.method, state
        self.round = state.round
        self._unseen_models = self._build_served_models(None)
        self._has_stackable_model = is_stackable(blueprint.model)
        self.served_models = lru_cache(maxsize=256)(
            self._models_for_client
        )  # some methods mix a client's model when it is asked for
        self.packed_file = lru_cache(maxsize=4)(self._pack_file)
        self.needs_private_state = self._reads_private_state()  # and a first answer, before anybody waits for one

    def _reads_private_state(self) -> bool:
        private = _AccessRecorder()
        x = torch.zeros(1, *self.blueprint.inputs.shape)
        with torch.no_grad():
            predict_rows(self.method, self._unseen_models, x, private)
        return private.has_been_read

    def _models_for_client(self, client: ClientId | None) -> ServedModels:
        if client is None:
            return self._unseen_models
        if self.needs_private_state:
            raise NeedsPrivateState(
                f"client is {client!r}, but method {self.method.name} predicts with what clients keep to themselves, "
                "which is not here; leave client out to be served as one that never trained"
            )
        return self._build_served_models(client)

    def _build_served_models(self, client: ClientId | None) -> ServedModels:
        models = self.method.models_for(self.state, client)
        only = next(iter(models.values())) if len(models) == 1 and self.state.membership else None
        return ServedModels(models, next((name for name, m in self.state.models.items() if m is only), None))

    def predict_batch(self, requests: Sequence[PredictRequest]) -> list[PredictResult]:
        """All at once: rows that are served the same models together, and different ones stacked if they can be."""
        served_models = [self.served_models(a.client) for a in requests]
        indices_by_key: dict[tuple[Any, ...], list[int]] = {}
        for i, lot in enumerate(served_models):
            indices_by_key.setdefault((lot.key, requests[i].label_counts), []).append(i)
        batches = [
            (served_models[indices[0]], torch.cat([requests[i].x for i in indices]), requests[indices[0]].private_state)
            for indices in indices_by_key.values()
        ]
        with torch.no_grad():
            predictions = self._predict_each(batches)
        found: dict[int, PredictResult] = {}
        for indices, whole in zip(indices_by_key.values(), predictions, strict=True):
            start = 0
            for i in indices:
                rows = slice(start, start + len(requests[i].x))
                found[i] = PredictResult(self.round, whole.slice_rows(rows))
                start = rows.stop
        return [found[i] for i in range(len(requests))]

    def estimate_prior(self, x: Tensor) -> Tensor | None:
        """What an unseen client's inputs say of how often its classes occur, if anything: it runs what it would run
        itself."""
        assert self.method.adaptation_program is not None
        data = {UNLABELLED_SPLIT: Samples(x, torch.zeros(len(x), dtype=torch.int64))}
        _, kept = run_program(self.method.adaptation_program, Task(self._unseen_models.models), data, {})
        return kept[LABEL_COUNTS] if kept is not None and bool(kept[LABEL_COUNTS].any()) else None

    def _predict_each(self, batches: Sequence[tuple[ServedModels, Tensor, Tree]]) -> list[Predictions]:
        if self._is_stackable(batches):
            return self._predict_stacked([(lot, x) for lot, x, _ in batches])
        return [predict_rows(self.method, lot, x, private) for lot, x, private in batches]

    def _is_stackable(self, batches: Sequence[tuple[ServedModels, Tensor, Tree]]) -> bool:
        if len(batches) < 2 or not self._has_stackable_model or self.method.predict_routed is not None:
            return False
        shapes = {tree.signature(lot.models) for lot, _, _ in batches}
        return len(shapes) == 1 and not any(private for _, _, private in batches)

    def _predict_stacked(self, batches: Sequence[tuple[ServedModels, Tensor]]) -> list[Predictions]:
        """Models of one shape in one pass: [models, rows, ...], with rows of zeros where others have more."""
        most = max(len(x) for _, x in batches)
        x = torch.stack([torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) for _, x in batches])
        models = tree.map_leaves(lambda *leaves: torch.stack(leaves), *(lot.models for lot, _ in batches))
        logits = torch.func.vmap(lambda m, rows: self.method.predict(m, {}, rows))(models, x)
        return [to_predictions(lot, found[: len(x)]) for (lot, x), found in zip(batches, logits, strict=True)]

    @property
    def model_names(self) -> list[str]:
        return [SERVING_MODEL, *sorted(self.state.models)]

    def models(self, name: str, client: ClientId | None = None) -> Mapping[str, Params]:
        return self.served_models(client).models if name == SERVING_MODEL else {name: self.state.models[name]}

    def facts(self, name: str, client: ClientId | None = None) -> dict[str, Any]:
        """What goes with a file, for whoever answers with it elsewhere."""
        expert = self.served_models(client).expert if name == SERVING_MODEL else name
        return self.blueprint.facts() | {"expert": expert, "round": self.round}

    def _pack_file(self, name: str, client: ClientId | None = None) -> tuple[bytes, str]:
        """As safetensors, and an ETag."""
        data = pack(self.models(name, client), self.facts(name, client))
        return data, compute_etag(data)
