"""FedPHP: each client keeps a moving average of its trained models and imitates it in the next training.

Li, Zhan, Shao, Li, Song, FedPHP: federated personalization with inherited private models, ECML PKDD 2021.

| paper | here |
|---|---|
| inherited personal model (HPM) of client k | private state of the client: `client.inherit.InheritedTraining` |
| L = (1 - λ) L_CE + λ L_KT | λ is `train.transfer` |
| L_KT by distillation: -Σ softmax(z_HPM / T) log softmax(z) | T is `train.temperature`; z are logits |
| HPM ← μ HPM + (1 - μ) w_k, w_k as just trained | `client.inherit.mix_models` |
| μ = 0.9 min(1, z_k / (Q R)), z_k earlier participations | 0.9 is `train.inherit` |
| Q R, fraction of clients in a cohort times rounds | sent to clients: `stages.train.AggregateWithParticipation` |
| w ← Σ n_k/n w_k | weighted by samples |

In the first participation of a client μ is 0, so its inherited model is the one that it has just trained. A client is
served its inherited model, which it never sends. A client that has never trained is served the global model. The global
model differs from that of `fedavg`, because the models that clients send have imitated inherited models.

Deviations from the paper
-------------------------
- Source: the text of the paper was not available. The values of λ, T and μ are those of the authors' program.
- Transfer: the authors' program offers distillation and the maximum mean discrepancy of features. Here there is only
  distillation, because a user's own network need not define its features. As in that program, the logits of the
  inherited model are divided by the temperature and those of the trained model are not.
- First participation: the client imitates the model that it is sent. In the authors' program it imitates the initial
  model of the run.
- Q R: it is computed for the current round, because the fleet may change, rounded down, and at least 1.
"""

from __future__ import annotations

from shoal.client.inherit import InheritedTraining
from shoal.methods.composition.model_functions import one_model_for, one_model_init, personal_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.train import AggregateWithParticipation, LearningRate
from shoal.types import Method


def fedphp(setting: Setting) -> Method:
    """Builds the method with the options of the setting."""
    program = setting.make_training("train", InheritedTraining)
    rate = setting.make("train", LearningRate, lr=program.lr, rounds=setting.rounds)
    return Method(
        name="fedphp",
        init=one_model_init(setting.model),
        stages=(
            *select_at_random(setting),
            setting.make("train", AggregateWithParticipation, program=program, models_for=one_model_for, rate=rate),
        ),
        models_for=one_model_for,
        predict=personal_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
