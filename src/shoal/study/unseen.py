"""Evaluates the unseen clients of a run: without inputs, with some inputs, or with their true class prior."""

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
    """Returns the accuracies by the way in which the clients are served.

    - "none": with the models for unseen clients.
    - "20": with what is inferred from 20 inputs without labels.
    - "true": with the true label counts, which are the best that an estimate could reach.
    """
    method, unseen_clients = experiment.method, experiment.federation.unseen
    evaluations = {"none": evaluate_unseen(method, state, unseen_clients)}
    if method.adaptation_program is not None or method.models_for_inputs is not None:
        for n in num_inputs:
            evaluations[str(n)] = evaluate_unseen(method, state, unseen_clients, True, n, experiment.job.seed)
    if method.adaptation_program is not None:
        evaluations["true"] = _evaluate_with_true_counts(experiment, state)
    return {way: _accuracy_facts(evaluation) for way, evaluation in evaluations.items()}


def _evaluate_with_true_counts(experiment: Experiment, state: ServerState) -> Evaluation:
    method = experiment.method
    scores: dict[ClientId, Score] = {}
    for client, samples in experiment.federation.unseen.items():
        counts = torch.bincount(samples.y, minlength=method.num_classes).float()
        method_with_counts = replace(method, predict=_predict_with_counts(method.predict, counts))
        scores |= evaluate_unseen(method_with_counts, state, {client: samples}).clients
    return Evaluation(scores, None)


def _predict_with_counts(predict: Predict, counts: Tensor) -> Predict:
    return lambda models, private, x: predict(models, {LABEL_COUNTS: counts}, x)


def _accuracy_facts(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "accuracy": evaluation.summary()["accuracy"]["local"],
        "accuracy_by_client": {c: score.accuracy for c, score in sorted(evaluation.clients.items())},
    }
