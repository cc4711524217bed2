"""Secure aggregation: the server sees only sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.client.secure_aggregation import KEYS, SendPublicKey, TrainAndMaskUpdate
from shoal.methods.composition.aggregation import training_stage_fields
from shoal.methods.composition.builder import MethodBuilder
from shoal.methods.composition.capability import ONE_MODEL_PER_CLIENT
from shoal.methods.composition.piece import Piece, register
from shoal.stages.query import QueryClients
from shoal.stages.secure_aggregation import AggregateSecurely, UnmaskSums
from shoal.types import option


@register("aggregate", "secure")
@dataclass(frozen=True)
class SecureSum(Piece):
    """The mean, computed from sums: pairwise masks hide the update of every single client."""

    source = "Bonawitz et al. 2017, pairwise masks, without shares of keys"
    group = "secure"
    requires = (ONE_MODEL_PER_CLIENT,)
    requires_reason = "the server has no update of an individual client"
    client_sends = "a public key, once; then what it trained, under masks that cancel in the sum"
    client_keeps = "a private key, and the public keys of the other clients in its sum"
    server_learns = "of individual clients only whether they have samples, and the sum of their updates"

    min_clients: int = option(
        3, "Smallest number of clients with samples in a sum. With fewer, no client trains.", ge=2
    )

    def add_to(self, method: MethodBuilder) -> None:
        if method.setting.edges is not None:
            method.refuse(self, "edges would have to be trusted with single updates: leave --edges out")
        aggregation = method.setting.make(
            "train", AggregateSecurely, ("least",), **training_stage_fields(method), least=self.min_clients
        )
        training = method.ensure_set(method.training, "training")
        method.aggregation = replace(
            aggregation, program=TrainAndMaskUpdate(training, is_weighted_by_samples=aggregation.weighting == "size")
        )
        method.stages["represent"].append(QueryClients(SendPublicKey(), name=KEYS))
        method.stages["aggregate"].append(UnmaskSums())
