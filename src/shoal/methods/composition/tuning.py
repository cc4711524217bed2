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

PERSONALISE = "personalise"
IF_SEARCHED = OnlyIf("personalise.tune is true", lambda tuning: tuning.tune)


@dataclass(frozen=True)
class Tuning(HasOptions):
    """What is fine-tuned, and what to choose from."""

    group: ClassVar[str] = PERSONALISE
    part: Literal["all", "head"] = option("all", "Fine-tune all layers, or only the last layer (head).")
    search: bool = option(
        False, "Let the fleet choose learning rate and epochs of fine-tuning by their accuracy on validation samples."
    )
    lr_grid: str = option(
        "0.01,0.03,0.1,0.3",
        "Learning rates to choose from, separated by commas, in ascending order.",
        only_if=IF_SEARCHED,
    )
    epochs_grid: str = option(
        "1,2,5,10", "Numbers of epochs to choose from, separated by commas, in ascending order.", only_if=IF_SEARCHED
    )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(_parse_grid("rates", self.lr_grid, 1e-6))

    @property
    def numbers_of_epochs(self) -> tuple[int, ...]:
        found = _parse_grid("passes", self.epochs_grid, 0)
        if any(x != int(x) for x in found):
            raise UserError(f"option {PERSONALISE}.passes is {self.epochs_grid!r}; it must be whole numbers")
        return tuple(map(int, found))


def fine_tuning_stages(setting: Setting, models_for: ModelsFor) -> tuple[Stage, ...]:
    """What every client does whenever the fleet is evaluated, from the model that it is served then."""
    tuning = setting.make(PERSONALISE, Tuning)
    program_fields = {"send": False, "keep": True, "part": tuning.part, "name": PERSONALISE}
    training = setting.make_training(PERSONALISE, LocalTraining, epochs=5, **program_fields)
    if not tuning.search:
        if not training.epochs:
            setting.mark_without_effect(PERSONALISE, "part", unless="personalise.epochs is above 0")
        return (Personalise(training, models_for, rounds=setting.rounds, every_rounds=setting.eval_every),)
    setting.mark_without_effect(PERSONALISE, "lr", "epochs", unless="personalise.tune is false")
    tune = ChooseTuning(
        TryTuning(training, tuning.learning_rates, tuning.numbers_of_epochs),
        models_for,
        rounds=setting.rounds,
        every_rounds=setting.eval_every,
    )
    return tune, PersonaliseTuned(tune, training)


def _parse_grid(key: str, text: str, minimum: float) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or found != sorted(set(found)) or not minimum <= found[0] or not isfinite(found[-1]):
        raise UserError(
            f"option {PERSONALISE}.{key} is {text!r}; it must be numbers with commas between, from {minimum:g} on, each larger "
            "than the one before"
        )
    return found
