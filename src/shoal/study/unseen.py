"""Clients that a run held out of training: served without a word, by their inputs, or by what they really hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.engine import Evaluation, evaluate_unseen
from shoal.experiment.assemble import Bench
from shoal.metrics import Score
from shoal.types import LABEL_COUNTS, ClientId, Predict, ServerState


def unseen_figures(bench: Bench, state: ServerState, inputs: Sequence[int]) -> dict[str, Any]:
    """By how they are served: "none" as anybody is; "20" by so many inputs without labels; "true" by their own class
    frequencies, which nobody could know: what an estimate could reach at best."""
    method, held = bench.method, bench.federation.unseen
    found = {"none": evaluate_unseen(method, state, held)}
    if method.adaptation_program is not None or method.models_for_inputs is not None:
        for n in inputs:
            found[str(n)] = evaluate_unseen(method, state, held, True, n, bench.job.seed)
    if method.adaptation_program is not None:
        found["true"] = _with_true_counts(bench, state)
    return {how: _said(evaluation) for how, evaluation in found.items()}


def _with_true_counts(bench: Bench, state: ServerState) -> Evaluation:
    method = bench.method
    scores: dict[ClientId, Score] = {}
    for client, rows in bench.federation.unseen.items():
        counts = torch.bincount(rows.y, minlength=method.num_classes).float()
        told = replace(method, predict=_knowing(method.predict, counts))
        scores |= evaluate_unseen(told, state, {client: rows}).clients
    return Evaluation(scores, None)


def _knowing(predict: Predict, counts: Tensor) -> Predict:
    return lambda models, private, x: predict(models, {LABEL_COUNTS: counts}, x)


def _said(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "mean": evaluation.figures()["accuracy"]["mean"],
        "clients": {c: score.accuracy for c, score in sorted(evaluation.clients.items())},
    }
