"""Networks, and `Model`: a network seen as pure functions of its parameters."""

from shoal.models.model import Model, check_model, load_model, model_names

__all__ = ["Model", "check_model", "load_model", "model_names"]
