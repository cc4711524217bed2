"""Activation sparsity, as in FedEPC."""

from __future__ import annotations

from shoal.client.sparsity import MeasureSparsity
from shoal.client.train import LocalTraining
from shoal.methods.composition.builder import ClientColumn, MethodBuilder
from shoal.methods.composition.capability import CLIENT_VECTORS, SPARSITY_VECTORS, VECTORS_BEFORE_TRAINING
from shoal.methods.composition.model_functions import one_model_init
from shoal.methods.composition.piece import Piece, register
from shoal.stages.extract import KeepExtractor, extractor_for
from shoal.stages.query import QueryClients
from shoal.stages.select import SelectRandom
from shoal.types import ServerState


@register("represent", "sparsity")
class ActivationSparsity(Piece):
    """Lets every client report how often each channel of a ReLU layer outputs zero (SPRE)."""

    source = "Tang et al. 2025 (FedEPC), Eq. 1-2, Alg. 1"
    provides = (SPARSITY_VECTORS, CLIENT_VECTORS, VECTORS_BEFORE_TRAINING)
    must_be_used = (SPARSITY_VECTORS, CLIENT_VECTORS)
    client_sends = "how often each channel of a ReLU layer outputs zero over its samples, as four vectors"
    client_keeps = "the extraction model"
    server_learns = "these vectors, from which it can infer label distributions, and the number of samples"

    def add_to(self, method: MethodBuilder) -> None:
        setting, model = method.setting, method.setting.model
        adaptation = setting.make_training("represent", LocalTraining, epochs=1, name="represent")
        extractor = setting.make("represent", KeepExtractor, model=model)
        vectors = setting.make("represent", MeasureSparsity, adaptation=adaptation)
        query = setting.make(
            "represent", QueryClients, program=vectors, models_for=extractor_for, first_round=extractor.warmup
        )
        warmup = (SelectRandom(name="warmup"),) if extractor.warmup else ()

        def init(seed: int) -> ServerState:
            model.relu_index(vectors.layer)  # refuses an unknown layer before any client is queried
            return one_model_init(model)(seed)

        method.stages["represent"] += [*warmup, extractor, query]
        method.init = init
        follows_data = query.every_rounds > 0 and not vectors.noise_std  # noisy vectors are released once
        method.representation = ClientColumn("sparsity", num_parts=4, bounds=(0.0, 1.0), follows_data=follows_data)
        method.sparsity, method.first_sparsity_round = vectors, extractor.warmup
