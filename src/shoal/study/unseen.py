"""Clients that a run held out of training: served without a word, by their inputs, or by what they really hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.engine import Evaluation, evaluate_unseen
from shoal.experiment.assemble import Experiment
from shoal.metrics import Score
from shoal.types import LABEL_COUNTS, ClientId, Predict, ServerState


def evaluate_unseen_ways(experiment: Experiment, state: ServerState, num_inputs: Sequence[int]) -> dict[str, Any]:
    """By how they are served: "none" as anybody is; "20" by so many inputs without labels; "true" by their own class
    frequencies, which nobody could know: what an estimate could reach at best."""
    method, unseen_clients = experiment.method, experiment.federation.unseen
    found = {"none": evaluate_unseen(method, state, unseen_clients)}
    if method.adaptation_program is not None or method.models_for_inputs is not None:
        for n in num_inputs:
            found[str(n)] = evaluate_unseen(method, state, unseen_clients, True, n, experiment.job.seed)
    if method.adaptation_program is not None:
        found["true"] = _evaluate_with_true_counts(experiment, state)
    return {how: _accuracy_facts(evaluation) for how, evaluation in found.items()}


def _evaluate_with_true_counts(experiment: Experiment, state: ServerState) -> Evaluation:
    method = experiment.method
    scores: dict[ClientId, Score] = {}
    for client, rows in experiment.federation.unseen.items():
        counts = torch.bincount(rows.y, minlength=method.num_classes).float()
        method_with_counts = replace(method, predict=_predict_with_counts(method.predict, counts))
        scores |= evaluate_unseen(method_with_counts, state, {client: rows}).clients
    return Evaluation(scores, None)


def _predict_with_counts(predict: Predict, counts: Tensor) -> Predict:
    return lambda models, private, x: predict(models, {LABEL_COUNTS: counts}, x)


def _accuracy_facts(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "mean": evaluation.summary()["accuracy"]["mean"],
        "clients": {c: score.accuracy for c, score in sorted(evaluation.clients.items())},
    }
