"""Builds the stages of fine-tuning, whose learning rate and epochs are given or chosen on validation samples."""

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
IF_SEARCHED = OnlyIf("personalise.search is true", lambda tuning: tuning.search)


@dataclass(frozen=True)
class Tuning(HasOptions):
    """Options of fine-tuning: the part of the model that is trained, and the values that a search tries."""

    group: ClassVar[str] = PERSONALISE
    part: Literal["all", "head"] = option("all", "Fine-tune all layers, or only the last layer (head).")
    search: bool = option(
        False, "Let the fleet choose learning rate and epochs of fine-tuning by their accuracy on validation samples."
    )
    lr_grid: str = option(
        "0.01,0.03,0.1,0.3",
        "Search among these learning rates, separated by commas, in ascending order.",
        only_if=IF_SEARCHED,
    )
    epochs_grid: str = option(
        "1,2,5,10",
        "Search among these numbers of epochs, separated by commas, in ascending order.",
        only_if=IF_SEARCHED,
    )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Returns the learning rates of `lr_grid`."""
        return tuple(_parse_grid("lr_grid", self.lr_grid, 1e-6))

    @property
    def numbers_of_epochs(self) -> tuple[int, ...]:
        """Returns the numbers of epochs of `epochs_grid`."""
        numbers = _parse_grid("epochs_grid", self.epochs_grid, 0)
        if any(x != int(x) for x in numbers):
            raise UserError(f"option {PERSONALISE}.epochs_grid is {self.epochs_grid!r}; it must be whole numbers")
        return tuple(map(int, numbers))


def fine_tuning_stages(setting: Setting, models_for: ModelsFor) -> tuple[Stage, ...]:
    """Returns the stages in which every client fine-tunes its serving model whenever the fleet is evaluated."""
    tuning = setting.make(PERSONALISE, Tuning)
    program_fields = {"sends_model": False, "keeps_model": True, "part": tuning.part, "name": PERSONALISE}
    training = setting.make_training(PERSONALISE, LocalTraining, epochs=5, **program_fields)
    if not tuning.search:
        if not training.epochs:
            setting.mark_without_effect(PERSONALISE, "part", unless="personalise.epochs is above 0")
        return (Personalise(training, models_for, rounds=setting.rounds, every_rounds=setting.eval_every),)
    setting.mark_without_effect(PERSONALISE, "lr", "epochs", unless="personalise.search is false")
    tune = ChooseTuning(
        TryTuning(training, tuning.learning_rates, tuning.numbers_of_epochs),
        models_for,
        rounds=setting.rounds,
        every_rounds=setting.eval_every,
    )
    return tune, PersonaliseTuned(tune, training)


def _parse_grid(key: str, text: str, minimum: float) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or numbers != sorted(set(numbers)) or not minimum <= numbers[0] or not isfinite(numbers[-1]):
        raise UserError(
            f"option {PERSONALISE}.{key} is {text!r}; it must be numbers separated by commas, "
            f"in ascending order, each {minimum:g} or more"
        )
    return numbers
