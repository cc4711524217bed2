"""The functions of methods that say what clients start from, are sent, and answer with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from shoal import tree
from shoal.models import Model
from shoal.rng import derive_seed
from shoal.stages.experts import named_experts
from shoal.types import ClientId, Params, Predict, ServerState, Tree


def one_model_init(model: Model) -> Callable[[int], ServerState]:
    def init(seed: int) -> ServerState:
        return ServerState(0, {"global": model.init(derive_seed(seed, "init"))})

    return init


def one_expert_init(model: Model) -> Callable[[int], ServerState]:
    """One model, by the name that models of groups have."""

    def init(seed: int) -> ServerState:
        return ServerState(0, named_experts([model.init(derive_seed(seed, "init"))]))

    return init


def one_model_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    return {"global": state.models["global"]}


def one_model_predict(model: Model) -> Predict:
    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(models["global"], x)

    return predict


def personal_model_predict(model: Model, fallback: Predict | None = None) -> Predict:
    """The client's own model where it has one, else (a client that never trained) the global one, or `otherwise`."""
    others = fallback or one_model_predict(model)

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(private["model"], x) if "model" in private else others(models, private, x)

    return predict


def received_model_predict(model: Model) -> Predict:
    """The one model that a client is sent, whatever its name."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(next(iter(models.values())), x)

    return predict


def mean_model_predict(model: Model) -> Predict:
    """The mean of a client's experts as one model."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(tree.weighted_mean(list(models.values()), [1.0] * len(models)), x)

    return predict
