"""FedAvg with fine-tuning: each client trains the global model a little further and keeps the result.

The baseline that personalised methods must beat. Every client fine-tunes whenever the fleet is
evaluated, always from the current global model; an inference-only client gets the global model.

`personalise.part=head` trains the last layer only. `personalise.tune=true` has the fleet choose step and passes first:
every client tries all of `personalise.rates` and `personalise.passes` and tells how many of its validation rows each
gets right; the candidate with most hits over all clients is what everybody then fine-tunes with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from shoal.client.train import LocalTraining
from shoal.client.tune import TryTuning
from shoal.errors import UserError
from shoal.methods.fedavg import fedavg
from shoal.methods.setting import Setting
from shoal.methods.single import one_model_for, own_model_predict
from shoal.stages.personalise import Personalise
from shoal.stages.tune import PersonaliseTuned, Tune
from shoal.types import Method, Stage

PIECE = "personalise"


@dataclass(frozen=True)
class Tuning:
    """What is fine-tuned, and what to choose from."""

    part: Literal["all", "head"] = "all"
    tune: bool = False
    rates: str = "0.01,0.03,0.1,0.3"
    passes: str = "1,2,5,10"

    @property
    def steps(self) -> tuple[float, ...]:
        return tuple(_numbers("rates", self.rates, 1e-6))

    @property
    def counts(self) -> tuple[int, ...]:
        found = _numbers("passes", self.passes, 0)
        if any(x != int(x) for x in found):
            raise UserError(f"option {PIECE}.passes is {self.passes!r}; it must be whole numbers")
        return tuple(map(int, found))


def fedavg_ft(s: Setting) -> Method:
    base, tuning = fedavg(s), s.make(PIECE, Tuning)
    kept = {"send": False, "keep": True, "part": tuning.part, "name": PIECE}
    training = s.training(PIECE, LocalTraining, epochs=5, **kept)
    _refuse_at_odds(s, tuning)
    stages = _tuned(s, tuning, training) if tuning.tune else (_personalise(s, training),)
    return replace(base, name="fedavg-ft", stages=(*base.stages, *stages), predict=own_model_predict(s.model))


def _personalise(s: Setting, training: LocalTraining) -> Stage:
    return Personalise(training, one_model_for, rounds=s.rounds, every=s.eval_every)


def _tuned(s: Setting, tuning: Tuning, training: LocalTraining) -> tuple[Stage, ...]:
    tune = Tune(TryTuning(training, tuning.steps, tuning.counts), one_model_for, rounds=s.rounds, every=s.eval_every)
    return tune, PersonaliseTuned(tune, training)


def _refuse_at_odds(s: Setting, tuning: Tuning) -> None:
    """An option that would do nothing."""
    idle = ("lr", "epochs") if tuning.tune else ("rates", "passes")
    for key in idle:
        if key in s.options.get(PIECE, {}):
            why = "it is chosen from rates and passes" if tuning.tune else "nothing is chosen"
            raise UserError(f"option {PIECE}.{key} is of no use with {PIECE}.tune={str(tuning.tune).lower()}: {why}")


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
