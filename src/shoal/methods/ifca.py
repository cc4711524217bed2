"""IFCA: every client takes that of several models which fits its data best, and trains it; choices make the groups.

Ghosh, Chung, Yin, Ramchandran, An efficient framework for clustered federated learning, NeurIPS 2020, Algorithm 1 with
model averaging.

| paper | here |
|---|---|
| k models θ_j | `cluster.groups` first models by chance: `stages.model_choice.Starts` |
| M_t, the clients of a round | `--cohort`: `stages.select.Random` |
| ĵ = argmin_j F_i(θ_j), told as s_i | `client.model_choice.ChooseAndTrain`; of several the first |
| LocalUpdate: τ, γ | `train.epochs`, `train.lr`: `client.train.LocalTraining` |
| θ_j ← Σ s_ij θ̃_i / Σ s_ij | `stages.model_choice.FederateChoices`, with `train.weighting=uniform` |
| random restarts | `cluster.restarts` |

A model that nobody chose stays as it is.

Deviation: at rounds that are evaluated everybody chooses among the models as they are then, charged as preparation, so
that all are served a model of their choice. A client without data chooses none, counts in no mean, and is served the
model of the largest group. How the paper restarts could not be had: here starts follow each other in the first half of
the run, and that with the lowest loss over all clients' rows goes on; they are compared, so all must train at one rate
(`train.schedule=constant`). The default is one start, as in the authors' program for MNIST. The first rounds of their
program for FEMNIST, in which clients are dealt to models by chance, are left out: planted groups were found no more
often with them. So are the averaging of gradients and the sharing of all layers but the last.
"""

from __future__ import annotations

from shoal.client.model_choice import ChooseAndTrain, ChooseModel
from shoal.client.train import LocalTraining
from shoal.errors import UserError
from shoal.methods.composition.model_functions import received_model_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedavg import select_at_random
from shoal.stages.experts import expert_for
from shoal.stages.model_choice import AggregateByChoice, RandomRestarts, RechooseModels, all_models
from shoal.stages.train import LearningRate
from shoal.types import Method


def ifca(setting: Setting) -> Method:
    training = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds)
    program, stage_fields = ChooseAndTrain(training), {"models_for": all_models, "weighting": "uniform"}
    train = setting.make("train", AggregateByChoice, program=program, rate=rate, **stage_fields)
    choose = ChooseModel(setting.model)
    starts = setting.make("cluster", RandomRestarts, program=choose, model=setting.model, rounds=setting.rounds)
    if starts.restarts > 1 and rate.schedule != "constant":
        raise UserError(
            f"cluster.restarts is {starts.restarts} and train.schedule is {rate.schedule!r}; starts are compared, so "
            "the schedule must be constant, or restarts 1"
        )
    rechoose = RechooseModels(choose, rounds=setting.rounds, every_rounds=setting.eval_every)
    return Method(
        name="ifca",
        init=starts.init,
        stages=(starts, *select_at_random(setting), train, rechoose),
        models_for=expert_for,
        predict=received_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
