"""FedPHP: each client keeps a moving average of the models that it trained, and imitates it when it trains the next.

Li, Zhan, Shao, Li, Song, FedPHP: federated personalization with inherited private models, ECML PKDD 2021.

| paper | here |
|---|---|
| inherited private model (HPM) of client k | kept by it: `client.inherit.InheritedTraining` |
| L = (1 - λ) L_CE + λ L_KT | λ is `train.transfer` |
| L_KT by distillation: -Σ softmax(z_HPM / T) log softmax(z) | T is `train.temperature`; z are logits |
| HPM ← μ HPM + (1 - μ) w_k, w_k as just trained | `client.inherit.mixed` |
| μ = 0.9 min(1, z_k / (Q R)), z_k earlier participations | 0.9 is `train.inherit` |
| Q R, the cohort's share of the fleet times all rounds | sent to clients: `stages.train.FederatePlanned` |
| w ← Σ n_k/n w_k | averaged by rows |

The private model of a client that takes part for the first time is what it trained then, for μ is 0. It is what the
client is served, and never sent; who never took part is served the global model. The global model is not `fedavg`'s:
what clients send has imitated their private models.

Deviation: the authors' program has two ways of transfer, distillation and the maximum mean discrepancy of features;
here only the first, for a network of one's own need not say what its features are. As there, the private model's logits
are softened and the trained one's are not. A client that takes part for the first time imitates the model that it is
sent, in that program the very first one. Q R is that of the round at hand, rounded down and at least 1, since the fleet
may change. Values of λ, T and μ are those of their program; the paper's text was not at hand.
"""

from __future__ import annotations

from shoal.client.inherit import InheritedTraining
from shoal.methods.composition.model_functions import one_model_for, one_model_init, personal_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.train import AggregateWithParticipation, LearningRate
from shoal.types import Method


def fedphp(setting: Setting) -> Method:
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
