"""FedAvg: some clients train the global model, the server averages what returns.

McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.

| paper | here |
|---|---|
| C·K clients per round | `--cohort`: `stages.select.Uniform` |
| E, B, η | `train.epochs`, `train.batch_size`, `train.lr` |
| w ← Σ n_k/n w_k, over the clients of the round | `stages.train.Federate` |
"""

from __future__ import annotations

from shoal.client.train import LocalTraining
from shoal.methods.setting import Setting
from shoal.methods.single import one_model_for, one_model_init, one_model_predict
from shoal.stages.select import Uniform
from shoal.stages.train import Federate, Rate
from shoal.types import Method, Stage


def fedavg(s: Setting) -> Method:
    return averaging(s, "fedavg", s.make("select", Uniform, size=s.cohort))


def averaging(s: Setting, name: str, select: Stage, mu: float = 0.0) -> Method:
    """One global model, trained by whom `select` chooses."""
    program = s.training("train", LocalTraining, mu=mu)
    rate = s.make("train", Rate, lr=program.lr, rounds=s.rounds)
    return Method(
        name=name,
        init=one_model_init(s.model),
        stages=(select, s.make("train", Federate, program=program, models_for=one_model_for, rate=rate)),
        models_for=one_model_for,
        predict=one_model_predict(s.model),
        classes=s.model.classes,
    )
