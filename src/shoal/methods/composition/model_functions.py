"""Functions that many methods share: the initial models, the models of a client, and the prediction with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from shoal import tree
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.stages.experts import named_experts
from shoal.types import ClientId, Params, Predict, ServerState, Tree


def one_model_init(model: Model) -> Callable[[int], ServerState]:
    """Returns a function that makes the initial state with one global model from a seed."""

    def init(seed: int) -> ServerState:
        return ServerState(0, {"global": model.init(derive_seed(seed, "init"))})

    return init


def one_expert_init(model: Model) -> Callable[[int], ServerState]:
    """Returns a function that makes the initial state with one model that has the name of the first expert."""

    def init(seed: int) -> ServerState:
        return ServerState(0, named_experts([model.init(derive_seed(seed, "init"))]))

    return init


def one_model_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the global model, for every client."""
    return {"global": state.models["global"]}


def one_model_predict(model: Model) -> Predict:
    """Returns a function that predicts with the global model."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(models["global"], x)

    return predict


def personal_model_predict(model: Model, fallback: Predict | None = None) -> Predict:
    """Returns a function that predicts with the client's personal model.

    A client without a personal model, such as an unseen client, predicts by `fallback`. Default: the global model.
    """
    predict_without = fallback or one_model_predict(model)

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(private["model"], x) if "model" in private else predict_without(models, private, x)

    return predict


def received_model_predict(model: Model) -> Predict:
    """Returns a function that predicts with the only model that a client is sent, whatever its name."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(next(iter(models.values())), x)

    return predict


def mean_model_predict(model: Model) -> Predict:
    """Returns a function that predicts with the mean of a client's experts as one model."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(tree.weighted_mean(list(models.values()), [1.0] * len(models)), x)

    return predict
