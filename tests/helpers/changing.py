"""A fleet whose clients join, leave and get other data between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal import engine
from shoal.fleet.vector import VectorFleet
from shoal.rng import derive_seed, generator
from shoal.types import ClientData, ClientId, Method, Samples


@dataclass
class SyntheticClients:
    """Draws clients with four classes in eight features. The features of a client may be inverted."""

    seed: int = 0
    classes: int = 4
    num_train_samples: int = 60

    def make_client(self, name: str, label_distribution: Sequence[float], is_inverted: bool = False) -> ClientData:
        centres = torch.randn(self.classes, 8, generator=torch.Generator().manual_seed(self.seed)) * 1.5
        g = generator(derive_seed(self.seed, name))

        def draw(num_samples: int) -> Samples:
            y = torch.multinomial(torch.tensor(label_distribution), num_samples, replacement=True, generator=g)
            x = torch.randn(num_samples, 8, generator=g) + centres[y]
            return Samples(-x if is_inverted else x, y)

        return {"train": draw(self.num_train_samples), "val": draw(10), "test": draw(100)}


class ChangingFleet(VectorFleet):
    """A fleet whose roster is the clients that have data now."""

    def roster(self) -> tuple[ClientId, ...]:
        return tuple(sorted(self.data))

    def update_clients(self, **data: ClientData) -> None:
        self.data = {**self.data, **data}

    def remove_clients(self, *clients: ClientId) -> dict[ClientId, ClientData]:
        removed = {c: self.data[c] for c in clients}
        self.data = {c: splits for c, splits in self.data.items() if c not in removed}
        return removed


class MethodRun:
    """Runs a method on a changing fleet, some rounds at a time."""

    def __init__(self, method: Method, fleet: ChangingFleet) -> None:
        self.method, self.fleet, self.state = method, fleet, method.init(0)
        self.round_metrics: list[Mapping[str, float]] = []  # of every round

    def run_until(self, last_round: int) -> None:
        result = engine.run(self.method, self.fleet, rounds=last_round, seed=0, state=self.state, eval_every=last_round)
        self.state = result.state
        self.round_metrics += [record.metrics for record in result.rounds]

    def accuracy(self, client: ClientId) -> float:
        """Returns the test accuracy of the models that the client is served now."""
        x, y = self.fleet.data[client]["test"]
        models = self.method.models_for(self.state, client)
        logits = self.method.predict(models, self.fleet.private.get(client, {}), x)
        return float((logits.argmax(-1) == y).float().mean())

    @property
    def clusters(self) -> dict[ClientId, int]:
        return {c: int(weights.argmax()) for c, weights in self.state.membership.items()}
