"""A small network that weighs several models for each row, and the program that trains it.

Models are frozen: what they say of a row is computed once, and only the gate is trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from shoal.client.adam import Adam
from shoal.client.choose import Choose
from shoal.client.train import LocalTraining, cross_entropy
from shoal.errors import UserError
from shoal.models import Model
from shoal.rng import derive_seed, generator
from shoal.types import FIXED, Batch, Params, Phase, Predict, Report, Task, Tree

EPS = 1e-4  # of Adam: with torch's 1e-8 the rounding errors of a slope that is 0 become steps of full length
KEPT = 0  # the place of the model that is always used: the client's own


@dataclass(frozen=True)
class Gate:
    """How much each model counts for a row: a network's scores, corrected by how sure each model is.

    A model's confidence is its negative free energy, logsumexp(logits / T), added to the log of its prior weight; with
    `calibrate=False` priors alone decide. Beside the client's own model, which always counts, `top` experts do (0:
    all); of more than `shortlist` only so many are run, by their priors (0: all are), never fewer than count. With
    `prior="uniform"` there is no network. With `denoise` experts that are less sure of a row than the client's own
    model do not count for it. `mix` says what is averaged: logits, or probabilities.
    """

    hidden: int = 16
    top: int = 2
    shortlist: int = 3
    temperature: float = 1.0
    calibrate: bool = True
    denoise: bool = False
    prior: Literal["learned", "uniform"] = "learned"
    mix: Literal["logits", "probabilities"] = "logits"

    def __post_init__(self) -> None:
        for key, least in (("hidden", 1), ("top", 0), ("shortlist", 0)):
            if getattr(self, key) < least:
                raise UserError(f"gate.{key} is {getattr(self, key)}; it must be {least} or more")
        if self.temperature <= 0:
            raise UserError(f"gate.temperature is {self.temperature}; it must be above 0")

    def init(self, inputs: int, models: int, seed: int, device: str = "cpu") -> Params:
        """The last layer is zero: at first all models count the same."""
        g, bound = generator(derive_seed(seed, "gate")), inputs**-0.5
        first = {
            "weight1": (torch.rand(self.hidden, inputs, generator=g) * 2 - 1) * bound,
            "bias1": (torch.rand(self.hidden, generator=g) * 2 - 1) * bound,
            "weight2": torch.zeros(models, self.hidden),
            "bias2": torch.zeros(models),
        }
        return {k: x.to(device) for k, x in first.items()}

    def scores(self, gate: Params, x: Tensor) -> Tensor:
        """[rows, models], of inputs [rows, ...]"""
        inside = F.relu(F.linear(x.flatten(1), gate["weight1"], gate["bias1"]))
        scores = F.linear(inside, gate["weight2"], gate["bias2"])
        return scores if self.prior == "learned" else torch.zeros_like(scores)

    def run(self, scores: Tensor) -> Tensor:
        """Which models are run for a row: [rows, models], by priors only, which decide alone where confidence does not
        matter."""
        spare = self.top and self.shortlist and max(self.top, self.shortlist)
        if self.prior == "uniform":
            spare = 0  # there is nothing to choose by
        return self._largest(scores, spare if self.calibrate or self.denoise else self.top)

    def log_weights(self, scores: Tensor, logits: Tensor) -> Tensor:
        """[rows, models] from logits [rows, models, classes]; -inf for a model that does not count (Alg. 2, 4-19)."""
        told = F.log_softmax(scores, dim=-1)  # the prior, line 5
        sure = torch.logsumexp(logits / self.temperature, dim=-1)  # log of beta, line 9
        if self.calibrate:
            told = told + sure  # line 10
        if self.denoise:
            told = told.masked_fill(sure < sure[..., KEPT : KEPT + 1], -torch.inf)
        if self._chooses(told):
            told = told.masked_fill(~self.run(scores), -torch.inf)
            told = told.masked_fill(~self._largest(told, self.top), -torch.inf)  # lines 12-17
        return F.log_softmax(told, dim=-1)  # line 19

    def mixed(self, log_weights: Tensor, logits: Tensor) -> Tensor:
        """[rows, classes]: what is predicted, as logits (line 20)."""
        if self.mix == "logits":
            return (log_weights.exp()[..., None] * logits).sum(-2)
        return torch.logsumexp(log_weights[..., None] + F.log_softmax(logits, dim=-1), dim=-2)

    def _chooses(self, x: Tensor) -> bool:
        return 0 < self.top < x.shape[-1] - 1

    def _largest(self, x: Tensor, count: int) -> Tensor:
        """The client's own model, and as many experts as are asked for."""
        if not count or x.shape[-1] - 1 <= count:
            return torch.ones_like(x, dtype=torch.bool)
        order = 1e-6 * torch.arange(x.shape[-1] - 1, device=x.device)  # of equals the first, on every fleet
        places = (x[..., KEPT + 1 :].detach() - order).topk(count, dim=-1).indices + KEPT + 1
        own = torch.full_like(places[..., :1], KEPT)
        return torch.zeros_like(x).scatter(-1, torch.cat([own, places], dim=-1), 1.0) > 0


def confident(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Models [rows, models, classes] weighed by their confidence alone: for whoever has no gate."""
    weights = torch.logsumexp(logits / temperature, dim=-1).softmax(-1)
    return (weights[..., None] * logits).sum(-2)


@dataclass(frozen=True)
class FitGate:
    """How a gate is trained on what frozen models say of each row: with Adam, on one split of the client's rows."""

    model: Model
    gate: Gate
    epochs: int = 10
    batch_size: int = 64
    lr: float = 0.005
    split: str = field(default="train", metadata=FIXED)

    def __post_init__(self) -> None:
        for key, least in (("epochs", 0), ("batch_size", 1)):
            if getattr(self, key) < least:
                raise UserError(f"gate.{key} is {getattr(self, key)}; it must be {least} or more")
        if self.lr <= 0:
            raise UserError(f"gate.lr is {self.lr}; it must be above 0")

    @property
    def optimiser(self) -> Adam:
        return Adam(self.lr, eps=EPS)

    def begin(self, models: int, seed: int) -> Tree:
        inputs = torch.Size(self.model.input_shape).numel()
        gate = self.gate.init(inputs, models, seed, self.model.device)
        return {"gate": gate, "adam": self.optimiser.init(gate)}

    def phases(self, say: Callable[[Tree, Tensor], Tensor]) -> tuple[Phase, ...]:
        """`say`: logits of all models, [rows, models, classes], computed of each row once. Without a network there is
        nothing to train."""
        if self.gate.prior == "uniform":
            return ()

        def inputs(s: Tree, x: Tensor) -> Tensor:
            """What the gate sees and what every model says, side by side."""
            return torch.cat([x.flatten(1), say(s, x).flatten(1)], dim=1)

        return (Phase(self.split, self.epochs, self.batch_size, self.step, inputs=inputs),)

    def objective(self, gate: Params, b: Batch) -> Tensor:
        models = gate["bias2"].shape[0]
        width = b.x.shape[1] - models * self.model.classes
        x, logits = b.x[:, :width], b.x[:, width:].reshape(-1, models, self.model.classes)
        weights = self.gate.log_weights(self.gate.scores(gate, x), logits)
        return cross_entropy(self.gate.mixed(weights, logits), b) / b.w.sum().clamp(min=1)  # Alg. 2, line 21

    def step(self, s: Tree, b: Batch) -> Tree:
        """Only the gate is trained (Alg. 2, 22-23)."""
        slopes = grad(self.objective)(s["gate"], b)
        gate, adam = self.optimiser.update(s["gate"], slopes, s["adam"])
        return s | {"gate": gate, "adam": adam}


@dataclass(frozen=True)
class TrainGate:
    """The client's own model from the best of the received experts, then the gate over it and all of them.

    The own model is trained on some rows that no shared model sees (`own.rows`), or is the one that the client has
    trained from round to round (`start="cold"`). Without `choice` there is one expert to start from. Experts and own
    model are frozen while the gate is trained. Model and gate stay with the client, and the report says nothing that
    follows from them.
    """

    fit: FitGate
    own: LocalTraining
    choice: Choose | None
    start: Literal["warm", "cold"] = "warm"
    name: str = "personalise"

    @property
    def batchable(self) -> bool:
        return self.own.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        warm = self.own.phases if self.start == "warm" else ()
        if warm and self.choice is not None:
            (compare,) = self.choice.phases
            warm = (replace(compare, finish=self.take), *warm)
        return (*warm, *self.fit.phases(self.say))

    def begin(self, task: Task, private: Tree) -> Tree:
        own = private["model"] if self.start == "cold" and "model" in private else next(iter(task.models.values()))
        s = self.own.begin(replace(task, models={"own": own}), {}) | {"models": dict(sorted(task.models.items()))}
        if self.choice is not None:
            s |= self.choice.begin(task, private)
        return s | self.fit.begin(1 + len(task.models), task.seed)

    def take(self, s: Tree) -> Tree:
        assert self.choice is not None
        chosen = self.choice.chosen(s)
        return s | self.own.start_at(chosen, towards=chosen)

    def say(self, s: Tree, x: Tensor) -> Tensor:
        models = [self.own.whole(s), *s["models"].values()]
        return torch.stack([self.fit.model.predict(m, x) for m in models], dim=1)

    def end(self, task: Task, s: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        marks = torch.stack([_mark(self.fit.model, m) for m in s["models"].values()])
        return Report(), {"model": self.own.whole(s), "gate": s["gate"], "experts": {"marks": marks}}


def _mark(model: Model, params: Params) -> Tensor:
    """What tells one expert from another: the last of its parameters, which every step changes."""
    return params[model.trainable[-1]].flatten()


def gated_predict(model: Model, gate: Gate) -> Predict:
    """Whoever has no gate for just these experts, such as a client that never trained, weighs them by confidence."""

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        experts = [models[k] for k in sorted(models)]
        own = [private["model"]] if "model" in private else []
        logits = torch.stack([model.predict(m, x) for m in (*own, *experts)], dim=1)
        sure = confident(logits, gate.temperature)
        if not _fits(private, experts):
            return sure
        mixed = gate.mixed(gate.log_weights(gate.scores(private["gate"], x), logits), logits)
        return torch.where(_same(model, private, experts), mixed, sure)

    return predict


def routed_predict(model: Model, gate: Gate, models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
    """The same prediction, with every model run for those rows only for which its prior allows it to count. Which these
    are depends on the rows, so clients cannot be stacked: for serving."""
    experts = [models[k] for k in sorted(models)]
    if not _fits(private, experts) or not bool(_same(model, private, experts)):
        return gated_predict(model, gate)(models, private, x)
    scores = gate.scores(private["gate"], x)
    run, count = gate.run(scores), 1 + len(experts)
    if bool(run.all()):
        return gated_predict(model, gate)(models, private, x)
    place, row = run.T.nonzero(as_tuple=True)  # by model, and within a model by row
    ends = run.sum(0).cumsum(0).tolist()
    parts = [row[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    pairs = zip((private["model"], *experts), parts, strict=True)
    said = torch.cat([model.predict(m, x.index_select(0, rows)) for m, rows in pairs if len(rows)])
    logits = x.new_zeros(len(x) * count, model.classes).index_copy_(0, row * count + place, said)
    logits = logits.view(len(x), count, model.classes)
    return gate.mixed(gate.log_weights(scores, logits), logits)


def _same(model: Model, private: Tree, experts: Sequence[Params]) -> Tensor:
    """Whether a gate was trained for just these: clusters are renumbered, and a client may have been away."""
    return (torch.stack([_mark(model, m) for m in experts]) == private["experts"]["marks"]).all()


def _fits(private: Tree, experts: Sequence[Params]) -> bool:
    return "gate" in private and len(private["gate"]["bias2"]) == 1 + len(experts)
