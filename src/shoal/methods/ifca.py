"""IFCA: every client trains the model, of several, that fits its data best, and these choices form the clusters.

Ghosh, Chung, Yin, Ramchandran, An efficient framework for clustered federated learning, NeurIPS 2020, Algorithm 1 with
model averaging.

| paper | here |
|---|---|
| k models θ_j | `cluster.num_clusters` random first models: `stages.model_choice.RandomRestarts` |
| M_t, the clients of a round | `--cohort`: `stages.select.SelectRandom` |
| ĵ = argmin_j F_i(θ_j), reported as s_i | `client.model_choice.ChooseAndTrain`; the first model if several are equal |
| LocalUpdate: τ, γ | `train.epochs`, `train.lr`: `client.train.LocalTraining` |
| θ_j ← Σ s_ij θ̃_i / Σ s_ij | `stages.model_choice.AggregateByChoice`, with `train.weighting=uniform` |
| random restarts | `cluster.restarts` |

A model that no client chose stays unchanged.

Deviations from the paper
-------------------------
- Evaluation: in rounds that are evaluated all clients choose again among the current models, charged as preparation, so
  that every client is served a model of its choice.
- Clients without samples: they choose no model, count in no mean, and are served the model of the largest cluster.
- Restarts: we could not find how the paper restarts. Here the starts follow each other in the first half of the run,
  and the start with the lowest loss over the samples of all clients continues. The starts are compared, so all must
  train with the same learning rate (`train.schedule=constant`). The default is one start, as in the authors' program
  for MNIST.
- First rounds: in the authors' program for FEMNIST the first rounds assign clients to models at random. These rounds
  are left out, because they did not find planted groups more often.
- Variants: averaging of gradients and sharing of all layers but the last are left out.
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
    """Builds the method with the options of the setting."""
    training = setting.make_training("train", LocalTraining)
    rate = setting.make("train", LearningRate, lr=training.lr, rounds=setting.rounds)
    program, stage_fields = ChooseAndTrain(training), {"models_for": all_models, "weighting": "uniform"}
    train = setting.make("train", AggregateByChoice, program=program, rate=rate, **stage_fields)
    choose_model = ChooseModel(setting.model)
    starts = setting.make("cluster", RandomRestarts, program=choose_model, model=setting.model, rounds=setting.rounds)
    if starts.restarts > 1 and rate.schedule != "constant":
        raise UserError(
            f"cluster.restarts is {starts.restarts} and train.schedule is {rate.schedule!r}; starts are compared, so "
            "train.schedule must be constant, or cluster.restarts 1"
        )
    rechoose = RechooseModels(choose_model, rounds=setting.rounds, every_rounds=setting.eval_every)
    return Method(
        name="ifca",
        init=starts.init,
        stages=(starts, *select_at_random(setting), train, rechoose),
        models_for=expert_for,
        predict=received_model_predict(setting.model),
        num_classes=setting.model.num_classes,
    )
