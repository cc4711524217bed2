"""The model with which clients measure the representation of their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError
from safetensors.torch import load_file

from shoal.errors import UserError
from shoal.models import Model
from shoal.stages.base import ServerOnly
from shoal.types import ClientId, HasOptions, Params, Report, ServerState, option

EXTRACTOR = "extractor"


@dataclass(frozen=True)
class KeepExtractor(ServerOnly, HasOptions):
    """Keeps one model for all clients, so that reports of different rounds can be compared.

    The model comes from a file or is the global model after `warmup` rounds. With 0 it has the initial weights.
    """

    group: ClassVar[str] = "represent"
    model: Model
    warmup: int = option(
        0,
        "Train the global model for this many rounds before its weights are used to measure sparsity. 0 uses the "
        "initial weights.",
        ge=0,
    )
    weights: str = option(
        "",
        "Measure sparsity with the weights in this safetensors file, parameters by name. An empty text uses the "
        "weights of the run.",
    )
    name: str = EXTRACTOR

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup and self.weights:
            raise UserError(
                f"represent.warmup is {self.warmup} and represent.weights is {self.weights!r}. Only one of them can "
                "be set."
            )

    def fold(self, state: ServerState, reports: Mapping[ClientId, Report], seed: int) -> ServerState:
        if self.name in state.memory or state.round < self.warmup:
            return state
        model = self._load_weights() if self.weights else next(iter(state.models.values()))
        return replace(state, memory={**state.memory, self.name: {k: v.cpu() for k, v in model.items()}})

    def _load_weights(self) -> Params:
        """Returns the model of the file. Only the server reads it, so clients need not have the file."""
        try:
            given = load_file(Path(self.weights))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"represent.weights is {self.weights!r}, but this is not a readable safetensors file: {error}"
            ) from error
        expected = self.model.init(0)
        for name in sorted({*expected, *given}):
            given_shape, expected_shape = (tuple(m[name].shape) if name in m else None for m in (given, expected))
            if given_shape != expected_shape:
                raise UserError(
                    f"represent.weights is {self.weights!r}, in which {name} has shape {given_shape}. Model "
                    f"{self.model.name} needs shape {expected_shape}."
                )
        return {k: given[k].to(expected[k]) for k in expected}


def extractor_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
    """Returns the kept model, on the device of the models of the state."""
    like = next(iter(state.models.values()))
    return {EXTRACTOR: {k: v.to(like[k].device) for k, v in state.memory[EXTRACTOR].items()}}
