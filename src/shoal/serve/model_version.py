"""The models of one round of a run, and their predictions. A version never changes; a newer one replaces it."""

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

SERVING_MODEL = "served"  # the download of this name has all models that predict together


class PredictRequest(NamedTuple):
    """The samples of one request."""

    x: Tensor  # prepared
    client: ClientId | None = None
    label_counts: tuple[float, ...] | None = None  # of the caller, if it knows them

    @property
    def private_state(self) -> Tree:
        """The private state that the request stands for: the label counts of the caller, if there are any."""
        return {} if self.label_counts is None else {LABEL_COUNTS: torch.tensor(self.label_counts)}


class PredictResult(NamedTuple):
    """The predictions of one request."""

    round: int  # the models that predicted were saved after this round
    predictions: Predictions


class _AccessRecorder(Tree):
    """An empty private state that records whether a method reads it."""

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
    """The predictions of a client depend on its private state, which the service does not have."""


class ModelVersion:
    """The models of one round. Computes predictions and packs models for download."""

    def __init__(self, blueprint: Blueprint, state: ServerState) -> None:
        self.blueprint, self.method, self.state = blueprint, blueprint.method, state
        self.round = state.round
        self._unseen_models = self._build_served_models(None)
        self._has_stackable_model = is_stackable(blueprint.model)
        # Cached, because some methods compute the serving model of a client when it is first used.
        self.served_models = lru_cache(maxsize=256)(self._models_for_client)
        self.packed_file = lru_cache(maxsize=4)(self._pack_file)
        self.needs_private_state = self._reads_private_state()  # also warms the model up before the first request

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
                f"client is {client!r}, but method {self.method.name} predicts with the private state of the client, "
                "which the service does not have. Leave client out to use the serving model of unseen clients."
            )
        return self._build_served_models(client)

    def _build_served_models(self, client: ClientId | None) -> ServedModels:
        models = self.method.models_for(self.state, client)
        only = next(iter(models.values())) if len(models) == 1 and self.state.membership else None
        return ServedModels(models, next((name for name, m in self.state.models.items() if m is only), None))

    def predict_batch(self, requests: Sequence[PredictRequest]) -> list[PredictResult]:
        """Returns the result of every request.

        Requests with the same serving models form one batch. Batches with models of the same shape are stacked.
        """
        served_models = [self.served_models(request.client) for request in requests]
        indices_by_key: dict[tuple[Any, ...], list[int]] = {}
        for i, served in enumerate(served_models):
            indices_by_key.setdefault((served.key, requests[i].label_counts), []).append(i)
        batches = [
            (served_models[indices[0]], torch.cat([requests[i].x for i in indices]), requests[indices[0]].private_state)
            for indices in indices_by_key.values()
        ]
        with torch.no_grad():
            predictions = self._predict_each(batches)
        results: dict[int, PredictResult] = {}
        for indices, batch_predictions in zip(indices_by_key.values(), predictions, strict=True):
            start = 0
            for i in indices:
                rows = slice(start, start + len(requests[i].x))
                results[i] = PredictResult(self.round, batch_predictions.slice_rows(rows))
                start = rows.stop
        return [results[i] for i in range(len(requests))]

    def estimate_prior(self, x: Tensor) -> Tensor | None:
        """Returns the label counts that an unseen client's inputs suggest, or None if they are not reliable enough.

        The service runs the same client program that the client itself would run.
        """
        assert self.method.adaptation_program is not None
        data = {UNLABELLED_SPLIT: Samples(x, torch.zeros(len(x), dtype=torch.int64))}
        _, private_state = run_program(self.method.adaptation_program, Task(self._unseen_models.models), data, {})
        if private_state is None or not bool(private_state[LABEL_COUNTS].any()):
            return None
        return private_state[LABEL_COUNTS]

    def _predict_each(self, batches: Sequence[tuple[ServedModels, Tensor, Tree]]) -> list[Predictions]:
        if self._is_stackable(batches):
            return self._predict_stacked([(served, x) for served, x, _ in batches])
        return [predict_rows(self.method, served, x, private) for served, x, private in batches]

    def _is_stackable(self, batches: Sequence[tuple[ServedModels, Tensor, Tree]]) -> bool:
        if len(batches) < 2 or not self._has_stackable_model or self.method.predict_routed is not None:
            return False
        shapes = {tree.signature(served.models) for served, _, _ in batches}
        return len(shapes) == 1 and not any(private for _, _, private in batches)

    def _predict_stacked(self, batches: Sequence[tuple[ServedModels, Tensor]]) -> list[Predictions]:
        """Predicts batches of several models of one shape together.

        The inputs are [models, samples, ...]. Smaller batches are padded with zeros.
        """
        max_samples = max(len(x) for _, x in batches)
        x = torch.stack([torch.cat([x, x.new_zeros(max_samples - len(x), *x.shape[1:])]) for _, x in batches])
        models = tree.map_leaves(lambda *leaves: torch.stack(leaves), *(served.models for served, _ in batches))
        logits = torch.func.vmap(lambda m, rows: self.method.predict(m, {}, rows))(models, x)
        return [to_predictions(served, rows[: len(x)]) for (served, x), rows in zip(batches, logits, strict=True)]

    @property
    def model_names(self) -> list[str]:
        """The names of the downloads: all serving models together, and every model of the run."""
        return [SERVING_MODEL, *sorted(self.state.models)]

    def models(self, name: str, client: ClientId | None = None) -> Mapping[str, Params]:
        """Returns the models of a download."""
        return self.served_models(client).models if name == SERVING_MODEL else {name: self.state.models[name]}

    def facts(self, name: str, client: ClientId | None = None) -> dict[str, Any]:
        """Returns the metadata of a download, with which a caller can rebuild method and network."""
        expert = self.served_models(client).expert if name == SERVING_MODEL else name
        return self.blueprint.facts() | {"expert": expert, "round": self.round}

    def _pack_file(self, name: str, client: ClientId | None = None) -> tuple[bytes, str]:
        """Returns a download as safetensors, and its ETag."""
        data = pack(self.models(name, client), self.facts(name, client))
        return data, compute_etag(data)
