"""Fine-tuning: with a step and passes that are given, or that the fleet chooses on validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal

from shoal.client.train import LocalTraining
from shoal.client.tuning import TryTuning
from shoal.errors import UserError
from shoal.methods.composition.setting import Setting
from shoal.stages.personalise import Personalise
from shoal.stages.tuning import ChooseTuning, PersonaliseTuned
from shoal.types import HasOptions, ModelsFor, OnlyIf, Stage, option

PIECE = "personalise"
TUNED = OnlyIf("personalise.tune is true", lambda tuning: tuning.tune)


@dataclass(frozen=True)
class Tuning(HasOptions):
    """What is fine-tuned, and what to choose from."""

    group: ClassVar[str] = PIECE
    part: Literal["all", "head"] = option("all", "Fine-tune all layers, or only the last layer (head).")
    tune: bool = option(
        False, "Let the fleet choose learning rate and epochs of fine-tuning by their accuracy on validation samples."
    )
    rates: str = option(
        "0.01,0.03,0.1,0.3", "Learning rates to choose from, separated by commas, in ascending order.", only_if=TUNED
    )
    passes: str = option(
        "1,2,5,10", "Numbers of epochs to choose from, separated by commas, in ascending order.", only_if=TUNED
    )

    @property
    def steps(self) -> tuple[float, ...]:
        return tuple(_numbers("rates", self.rates, 1e-6))

    @property
    def counts(self) -> tuple[int, ...]:
        found = _numbers("passes", self.passes, 0)
        if any(x != int(x) for x in found):
            raise UserError(f"option {PIECE}.passes is {self.passes!r}; it must be whole numbers")
        return tuple(map(int, found))


def stages(s: Setting, models_for: ModelsFor) -> tuple[Stage, ...]:
    """What every client does whenever the fleet is evaluated, from the model that it is served then."""
    tuning = s.make(PIECE, Tuning)
    kept = {"send": False, "keep": True, "part": tuning.part, "name": PIECE}
    training = s.training(PIECE, LocalTraining, epochs=5, **kept)
    if not tuning.tune:
        if not training.epochs:
            s.without_effect(PIECE, "part", unless="personalise.epochs is above 0")
        return (Personalise(training, models_for, rounds=s.rounds, every_rounds=s.eval_every),)
    s.without_effect(PIECE, "lr", "epochs", unless="personalise.tune is false")
    tune = ChooseTuning(
        TryTuning(training, tuning.steps, tuning.counts), models_for, rounds=s.rounds, every_rounds=s.eval_every
    )
    return tune, PersonaliseTuned(tune, training)


def _numbers(key: str, text: str, least: float) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or found != sorted(set(found)) or not least <= found[0] or not isfinite(found[-1]):
        raise UserError(
            f"option {PIECE}.{key} is {text!r}; it must be numbers with commas between, from {least:g} on, each larger "
            "than the one before"
        )
    return found
