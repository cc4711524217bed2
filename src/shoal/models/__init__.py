"""Networks, and `Model`, which provides a network as pure functions of its parameters."""

from shoal.models.model import Model, load_model, model_names, network_factory

__all__ = ["Model", "load_model", "model_names", "network_factory"]
