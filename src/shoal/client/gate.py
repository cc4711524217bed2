"""A gate network that weights several models for each sample, and the program that trains it.

The models are frozen. Their logits are computed once for each sample, and only the gate is trained on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from shoal.client.adam import Adam
from shoal.client.model_choice import ChooseModel
from shoal.client.train import LocalTraining, cross_entropy
from shoal.models import Model
from shoal.rng import derive_seed, generator
from shoal.types import Batch, HasOptions, OnlyIf, Params, Phase, Predict, Report, Task, Tree, option

EPS = 1e-4  # for Adam: with torch's 1e-8, rounding errors of a gradient that is 0 would become full-length steps
IF_GATE_IS_TRAINED = OnlyIf(
    "gate.prior is learned and gate.epochs is above 0", lambda fit: fit.gate.prior == "learned" and fit.epochs > 0
)
ALWAYS_USED_INDEX = 0  # index of the model that always counts: the personal or the global one


@dataclass(frozen=True)
class Gate(HasOptions):
    """Computes the weight of each model for a sample: a network's scores, corrected by the models' confidence.

    The confidence of a model is its negative free energy, logsumexp(logits / T). It is added to the log of the prior
    weight, which is the network's score. With `calibrate=False` the prior weights alone decide, and with
    `prior="uniform"` there is no network. The first model always counts, together with the `top` best experts (0: all).
    Only the `shortlist` experts with the largest prior weights are run (0: all), but never fewer than `top`. With
    `denoise` an expert that is less confident about a sample than the first model does not count for the sample.
    """

    group: ClassVar[str] = "gate"
    hidden: int = option(
        16,
        "The gate network has one hidden layer of this many units.",
        ge=1,
        only_if=OnlyIf("gate.prior is learned", lambda gate: gate.prior == "learned"),
    )
    top: int = option(
        2,
        "For each sample only this many experts count, the ones with the largest weights. 0 lets all experts count.",
        ge=0,
    )
    shortlist: int = option(
        3,
        "Run only this many experts for a sample, the ones with the largest weights of the gate network, to save time. "
        "At least gate.top experts are run. 0 runs all experts.",
        ge=0,
        only_if=OnlyIf(
            "gate.top is above 0, gate.prior is learned, and gate.calibrate or gate.denoise is true",
            lambda gate: not gate.shortlist or (gate.top > 0 and gate.prior == "learned" and gate.uses_confidence),
        ),
    )
    temperature: float = option(
        1.0,
        "Divide the logits by this temperature before the confidence of a model is computed from them.",
        gt=0,
        only_if=OnlyIf(
            "gate.calibrate or gate.denoise is true", lambda gate: gate.uses_confidence or gate.serves_without_gate
        ),
    )
    calibrate: bool = option(
        True,
        "Correct the weight of each model by its confidence (negative free energy) on the sample. With false the gate "
        "network alone decides.",
    )
    denoise: bool = option(
        False,
        "Ignore experts that are less confident about a sample than the client's personal model, or than the global "
        "model where there is no personal model.",
    )
    prior: Literal["learned", "uniform"] = option(
        "learned",
        "Weight the models by a trained gate network (learned) or all equally (uniform). With "
        "gate.calibrate, both kinds of weights are then corrected by the confidence of the models.",
    )
    mix: Literal["logits", "probabilities"] = option(
        "logits", "Average the logits or the class probabilities of the models that count."
    )
    serves_without_gate: bool = False  # True if clients without a gate weight models by confidence

    def init(self, num_inputs: int, num_models: int, seed: int, device: str = "cpu") -> Params:
        """Returns the first parameters. The last layer is zero, so that all models have equal weights at first."""
        g, bound = generator(derive_seed(seed, "gate")), num_inputs**-0.5
        first = {
            "weight1": (torch.rand(self.hidden, num_inputs, generator=g) * 2 - 1) * bound,
            "bias1": (torch.rand(self.hidden, generator=g) * 2 - 1) * bound,
            "weight2": torch.zeros(num_models, self.hidden),
            "bias2": torch.zeros(num_models),
        }
        return {k: x.to(device) for k, x in first.items()}

    def scores(self, gate: Params, x: Tensor) -> Tensor:
        """Returns the network's scores [samples, models] for inputs [samples, ...]."""
        hidden = F.relu(F.linear(x.flatten(1), gate["weight1"], gate["bias1"]))
        scores = F.linear(hidden, gate["weight2"], gate["bias2"])
        return scores if self.prior == "learned" else torch.zeros_like(scores)

    def models_to_run(self, scores: Tensor) -> Tensor:
        """Returns, by the network's scores alone, True for the models that are run for a sample: [samples, models]."""
        is_run = self._is_among_largest(scores[..., ALWAYS_USED_INDEX + 1 :], self._num_experts_to_run)
        return F.pad(is_run, (1, 0), value=True)

    def log_weights(self, scores: Tensor, logits: Tensor) -> Tensor:
        """Returns the log weights [samples, models] from logits [samples, models, classes] (Alg. 2, 4-19).

        The log weight of a model that does not count is -inf.
        """
        corrected_scores = scores  # log of the prior weights, line 5, up to a constant that line 19 removes
        if self.calibrate or self.denoise:
            confidence = torch.logsumexp(logits / self.temperature, dim=-1)  # log of beta, line 9
            corrected_scores = corrected_scores + confidence if self.calibrate else corrected_scores  # line 10
        always_used, experts = (
            corrected_scores[..., : ALWAYS_USED_INDEX + 1],
            corrected_scores[..., ALWAYS_USED_INDEX + 1 :],
        )
        if self.denoise:
            experts = experts.masked_fill(
                confidence[..., ALWAYS_USED_INDEX + 1 :] < confidence[..., : ALWAYS_USED_INDEX + 1], -torch.inf
            )
        if 0 < self._num_experts_to_run < experts.shape[-1]:
            experts = experts.masked_fill(
                ~self._is_among_largest(scores[..., ALWAYS_USED_INDEX + 1 :], self._num_experts_to_run), -torch.inf
            )
        if 0 < self.top < min(experts.shape[-1], self._num_experts_to_run or experts.shape[-1]):
            experts = experts.masked_fill(~self._is_among_largest(experts, self.top), -torch.inf)  # lines 12-17
        return F.log_softmax(torch.cat([always_used, experts], dim=-1), dim=-1)  # line 19

    def mixture_logits(self, log_weights: Tensor, logits: Tensor) -> Tensor:
        """Returns the mixed prediction as logits [samples, classes] (line 20)."""
        if self.mix == "logits":
            return (log_weights.exp()[..., None] * logits).sum(-2)
        return torch.logsumexp(log_weights[..., None] + F.log_softmax(logits, dim=-1), dim=-2)

    @property
    def _num_experts_to_run(self) -> int:
        """The number of experts that are run for a sample; 0 for all."""
        if self.prior == "uniform":
            return 0  # equal scores cannot preselect experts
        return self.top and self.shortlist and max(self.top, self.shortlist) if self.uses_confidence else self.top

    @property
    def uses_confidence(self) -> bool:
        """True if weights depend on the confidence of models."""
        return self.calibrate or self.denoise

    def _is_among_largest(self, experts: Tensor, num_largest: int) -> Tensor:
        """Returns True for the experts with the largest values; of equal experts the first are taken on every fleet."""
        if not 0 < num_largest < experts.shape[-1]:
            return torch.ones_like(experts, dtype=torch.bool)
        order = 1e-6 * torch.arange(experts.shape[-1], device=experts.device)
        indices = (experts.detach() - order).topk(num_largest, dim=-1).indices
        return torch.zeros_like(experts, dtype=torch.bool).scatter(-1, indices, True)


def confidence_weighted_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns logits [samples, models, classes] averaged with weights from the models' confidence alone."""
    weights = torch.logsumexp(logits / temperature, dim=-1).softmax(-1)
    return (weights[..., None] * logits).sum(-2)


@dataclass(frozen=True)
class FitGate(HasOptions):
    """Trains a gate with Adam on the logits of frozen models, on one split of the client's samples."""

    model: Model
    gate: Gate
    group: ClassVar[str] = "gate"
    epochs: int = option(
        10,
        "Train the gate network for this many epochs. 0 leaves its initial, equal weights.",
        ge=0,
        only_if=OnlyIf("gate.prior is learned", lambda fit: fit.gate.prior == "learned"),
    )
    batch_size: int = option(64, "Each step of gate training uses this many samples.", ge=1, only_if=IF_GATE_IS_TRAINED)
    lr: float = option(0.005, "Adam trains the gate network with this learning rate.", gt=0, only_if=IF_GATE_IS_TRAINED)
    split: str = "train"

    @property
    def optimiser(self) -> Adam:
        """The optimiser of the gate network."""
        return Adam(self.lr, eps=EPS)

    def begin(self, num_models: int, seed: int) -> Tree:
        """Returns the state before training: a new gate and its optimiser state."""
        inputs = torch.Size(self.model.input_shape).numel()
        gate = self.gate.init(inputs, num_models, seed, self.model.device)
        return {"gate": gate, "adam": self.optimiser.init(gate)}

    def phases(self, logits_fn: Callable[[Tree, Tensor], Tensor]) -> tuple[Phase, ...]:
        """Returns the phases that train the gate; none without a network.

        `logits_fn` returns the logits of all models [samples, models, classes]. It is called once for each sample.
        """
        if self.gate.prior == "uniform":
            return ()

        def precompute(state: Tree, x: Tensor) -> Tensor:
            """Returns the flattened inputs and the logits of all models as columns of one table."""
            return torch.cat([x.flatten(1), logits_fn(state, x).flatten(1)], dim=1)

        return (Phase(self.split, self.epochs, self.batch_size, self.step, precompute=precompute),)

    def objective(self, gate: Params, batch: Batch) -> Tensor:
        """Returns the mean loss of the mixture on a batch of precomputed columns (Alg. 2, line 21)."""
        num_models = gate["bias2"].shape[0]
        width = batch.x.shape[1] - num_models * self.model.num_classes
        x, logits = batch.x[:, :width], batch.x[:, width:].reshape(-1, num_models, self.model.num_classes)
        weights = self.gate.log_weights(self.gate.scores(gate, x), logits)
        return cross_entropy(self.gate.mixture_logits(weights, logits), batch) / batch.w.sum().clamp(min=1)

    def step(self, state: Tree, batch: Batch) -> Tree:
        """Returns the state after one step, which changes only the gate (Alg. 2, 22-23)."""
        gradients = grad(self.objective)(state["gate"], batch)
        gate, adam = self.optimiser.update(state["gate"], gradients, state["adam"])
        return state | {"gate": gate, "adam": adam}


@dataclass(frozen=True)
class TrainGate:
    """Trains a personal model from the best received expert, then a gate over the personal model and all experts.

    The personal model may be trained on samples that no shared model uses (`personal_training.sensitivity`). With
    `start="cold"` it is the model that the client has trained from round to round. Without `choice` there is one expert
    to start from. Experts and personal model are frozen while the gate is trained. Model and gate stay in the private
    state, and the report contains nothing that depends on them.
    """

    fit: FitGate
    personal_training: LocalTraining
    choice: ChooseModel | None
    start: Literal["warm", "cold"] = "warm"
    name: str = "personalise"

    @property
    def batchable(self) -> bool:
        return self.personal_training.batchable

    @property
    def phases(self) -> tuple[Phase, ...]:
        warm = self.personal_training.phases if self.start == "warm" else ()
        if warm and self.choice is not None:
            (compare,) = self.choice.phases
            warm = (replace(compare, on_end=self.start_from_choice), *warm)
        return (*warm, *self.fit.phases(self.model_logits))

    def begin(self, task: Task, private: Tree) -> Tree:
        has_model = self.start == "cold" and "model" in private
        personal = private["model"] if has_model else next(iter(task.models.values()))
        state = self.personal_training.begin(replace(task, models={"own": personal}), {}) | {
            "models": dict(sorted(task.models.items()))
        }
        if self.choice is not None:
            state |= self.choice.begin(task, private)
        return state | self.fit.begin(1 + len(task.models), task.seed)

    def start_from_choice(self, state: Tree) -> Tree:
        """Returns the state in which personal training starts from the chosen expert."""
        assert self.choice is not None
        chosen = self.choice.chosen_model(state)
        return state | self.personal_training.start_at(chosen, anchor=chosen)

    def model_logits(self, state: Tree, x: Tensor) -> Tensor:
        """Returns the logits of the personal model and of all experts: [samples, models, classes]."""
        models = [self.personal_training.current_model(state), *state["models"].values()]
        return torch.stack([self.fit.model.predict(m, x) for m in models], dim=1)

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        fingerprints = torch.stack([expert_fingerprint(self.fit.model, m) for m in state["models"].values()])
        return Report(), {
            "model": self.personal_training.current_model(state),
            "gate": state["gate"],
            "experts": {"marks": fingerprints},
        }


def expert_fingerprint(model: Model, params: Params) -> Tensor:
    """Returns the last parameter as a vector. It differs between experts, because every training step changes it."""
    return params[model.trainable[-1]].flatten()


def gated_predict(model: Model, gate: Gate) -> Predict:
    """Returns the function that predicts with the client's gate.

    A client without a gate for exactly these experts, such as an unseen client, weights models by confidence.
    """

    def predict(models: Mapping[str, Params], private: Tree, x: Tensor) -> Tensor:
        experts = [models[k] for k in sorted(models)]
        personal = [private["model"]] if "model" in private else []
        logits = torch.stack([model.predict(m, x) for m in (*personal, *experts)], dim=1)
        by_confidence = confidence_weighted_logits(logits, gate.temperature)
        if not has_gate_for(private, experts):
            return by_confidence
        mixed = gate.mixture_logits(gate.log_weights(gate.scores(private["gate"], x), logits), logits)
        return torch.where(has_same_experts(model, private, experts), mixed, by_confidence)

    return predict


def has_same_experts(model: Model, private: Tree, experts: Sequence[Params]) -> Tensor:
    """Returns True if the client's gate was trained for these experts.

    Numbers of clusters change, and a client may have missed rounds, so names of experts are not enough.
    """
    return (torch.stack([expert_fingerprint(model, m) for m in experts]) == private["experts"]["marks"]).all()


def has_gate_for(private: Tree, experts: Sequence[Params]) -> bool:
    """Returns True if the client has a gate for as many experts."""
    return "gate" in private and len(private["gate"]["bias2"]) == 1 + len(experts)
