"""The three functions of methods with one global model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from shoal.models import Model
from shoal.rng import derive_seed
from shoal.types import ClientId, Params, Predict, ServerState, Tree


def one_model_init(model: Model) -> Callable[[int], ServerState]:
    def init(seed: int) -> ServerState:
        return ServerState(0, {"global": model.init(derive_seed(seed, "init"))})

    return init


def one_model_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    return {"global": state.models["global"]}


def one_model_predict(model: Model) -> Predict:
    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(models["global"], x)

    return predict


def own_model_predict(model: Model) -> Predict:
    """The client's own model where it has one, else the global one (a client that never trained)."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(private["model"] if "model" in private else models["global"], x)

    return predict


def received_model_predict(model: Model) -> Predict:
    """The one model that a client is sent, whatever its name."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        return model.predict(next(iter(models.values())), x)

    return predict
