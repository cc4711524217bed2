"""A method while it is put together: what the pieces of its seven steps lay down, and the method they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from shoal.errors import UserError
from shoal.methods.setting import Setting
from shoal.methods.single import one_model_for, one_model_init, one_model_predict
from shoal.stages.contribution import Coefficients
from shoal.stages.train import Federate
from shoal.types import Assign, ClientProgram, Guaranteed, Method, ModelsFor, Part, Predict, Route, ServerState, Stage

STEPS = ("represent", "cluster", "select", "train", "aggregate", "personalise", "serve")
AFTER = ("train", "aggregate", "serve", "personalise")
"""In which stages follow training: clients make their own of what they are served."""
DEFAULTS = {
    "represent": "none",
    "cluster": "none",
    "select": "random",
    "train": "sgd",
    "aggregate": "mean",
    "personalise": "none",
    "serve": "plain",
}

Models = Literal["one", "groups", "overlapping", "beside"]
"""Which models there are: one for all; one of each group; one of each cluster, of which a client may be in several; or
a global one and beside it, once groups are seen, one of each."""


class Piece(NamedTuple):
    """What can stand at a step, and what is said of it."""

    lay: Callable[[Draft], None]
    source: str  # the paper and where in it
    sends: str = "nothing"  # what each client sends for it
    keeps: str = "nothing"  # what each client learns or keeps
    tells: str = "nothing"  # what the server learns of single clients
    needs: Mapping[str, tuple[str, ...]] = {}  # step -> pieces, one of which must stand there
    why: str = ""  # it needs them
    says: str = ""  # what else should be known
    single: bool = True  # whether what it uses of training are single clients' updates, not only their sum

    def facts(self) -> dict[str, Any]:
        return {k: v for k, v in self._asdict().items() if k != "lay"}


@dataclass
class Draft:
    """Pieces are laid step by step; each may look at which pieces stand at other steps, and at what was laid before."""

    s: Setting
    chosen: Mapping[str, str]  # step -> the name of its piece
    stages: dict[str, list[Stage]] = field(default_factory=lambda: {step: [] for step in STEPS})
    models: Models = "one"
    trains: ModelsFor = one_model_for  # what a client trains
    serves: ModelsFor | None = None  # what it is served, if that is something else
    init: Callable[[int], ServerState] | None = None
    program: ClientProgram | None = None  # what a client runs to train
    federate: Federate | None = None
    around: Callable[[Federate], Stage] | None = None  # a word on what returns from training
    predict: Predict | None = None
    route: Route | None = None
    assign: Assign | None = None
    adapt: ClientProgram | None = None
    own: Callable[[ModelsFor], tuple[Stage, ...]] | None = None  # what clients make of what they are served in the end
    coefficients: Coefficients | None = None
    first_models: bool = False  # whether the mean of the first round is kept
    notes: tuple[str, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)  # what one piece leaves for another, by name

    def has(self, step: str, *names: str) -> bool:
        return any(name in names for name in self.chosen[step].split("+"))

    @property
    def served(self) -> ModelsFor:
        return self.serves or self.trains

    @property
    def measured(self) -> bool:
        """Whether clients tell how good what they trained is."""
        contribution = self.has("select", "contribution") or self.has("aggregate", "contribution", "cosine")
        return contribution or self.has("personalise", "update")

    def refuse(self, step: str, reason: str) -> NoReturn:
        raise UserError(f"{step} is {self.chosen[step]!r}, but {reason}")

    def method(self, name: str) -> Method:
        assert self.federate is not None, "the aggregate step lays it"
        training = self.around(self.federate) if self.around else self.federate
        if self.own is not None:
            self.stages["personalise"] += self.own(self.served)
        self._check_programs([training, *(stage for laid in self.stages.values() for stage in laid)])
        before = [stage for step in STEPS[:3] for stage in self.stages[step]]
        after = [stage for step in AFTER for stage in self.stages[step]]
        return Method(
            name=name,
            init=self.init or one_model_init(self.s.model),
            stages=(*before, training, *after),
            models_for=self.served,
            predict=self.predict or one_model_predict(self.s.model),
            classes=self.s.model.classes,
            route=self.route,
            assign=self.assign,
            adapt=self.adapt,
            parts=tuple(self.parts(training.name)),
            notes=self.notes,
        )

    def _check_programs(self, stages: Sequence[Stage]) -> None:
        """Clients know programs by their names; and what noise protects is told of one of them alone."""
        known: dict[str, ClientProgram] = {}
        for program in (p for stage in stages for p in stage.programs):
            if known.setdefault(program.name, program) != program:
                raise ValueError(f"two programs of the method are called {program.name!r}")
        noisy = [k for k, p in known.items() if isinstance(p, Guaranteed) and p.guarantee([1], 1)]
        if len(noisy) > 1:
            raise UserError(
                f"there is noise on what clients tell in {' and in '.join(noisy)}, and what both protect together is "
                "not known: it must be on one of them"
            )

    def parts(self, training: str) -> Iterator[Part]:
        """Of several pieces at one step the first has its stages."""
        for step in STEPS:
            laid = tuple(stage.name for stage in self.stages[step])
            first, *others = self.chosen[step].split("+")
            yield Part(step, first, (training, *laid) if step == "train" else laid)
            yield from (Part(step, name, ()) for name in others)
