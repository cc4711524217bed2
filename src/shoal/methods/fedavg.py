"""FedAvg: random clients train the global model, and the server averages the models that they send.

McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017.

| paper | here |
|---|---|
| C·K clients per round | `--cohort`: `stages.select.SelectRandom`, `select.probability` |
| E, B, η | `train.epochs`, `train.batch_size`, `train.lr` |
| w ← Σ n_k/n w_k, over the clients of the round | `stages.train.TrainAndAggregate` |
"""

from __future__ import annotations

from typing import Any

from shoal.client.size import SendSampleCount
from shoal.client.train import LocalTraining
from shoal.methods.composition.model_functions import one_model_for, one_model_init, one_model_predict
from shoal.methods.composition.setting import Setting
from shoal.stages.query import QueryClients
from shoal.stages.select import SIZE_STAGE, SelectRandom
from shoal.stages.train import LearningRate, TrainAndAggregate
from shoal.types import Method, Stage


def fedavg(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    return one_model_method(setting, "fedavg", *select_at_random(setting))


def select_at_random(setting: Setting) -> tuple[Stage, ...]:
    """Returns the stages that select random clients. Clients report their numbers of samples only if these are used."""
    select = setting.make("select", SelectRandom)
    return (select,) if select.probability == "uniform" else (QueryClients(SendSampleCount(), name=SIZE_STAGE), select)


def one_model_method(
    setting: Setting,
    name: str,
    *stages_before_training: Stage,
    mu: float = 0.0,
    fixed_keys: tuple[str, ...] = (),
    **stage_fields: Any,
) -> Method:
    """Builds a method with one global model, which the clients that the first stages select train.

    Parameters
    ----------
    setting : Setting
        The setting of the method.
    name : str
        The name of the method.
    *stages_before_training : Stage
        The stages that select the cohort.
    mu : float
        The default weight of the proximal term, `train.mu`.
    fixed_keys : tuple of str
        Options of `train` that users cannot set.
    **stage_fields
        Fields of the training stage.
    """
    program = setting.make_training("train", LocalTraining, fixed_keys, mu=mu)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    stage_fields |= {
        "program": program,
        "models_for": one_model_for,
        "rate": rate,
        "trainable": setting.model.trainable,
    }
    return Method(
        name=name,
        init=one_model_init(setting.model),
        stages=(*stages_before_training, setting.make("train", TrainAndAggregate, fixed_keys, **stage_fields)),
        models_for=one_model_for,
        predict=one_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
