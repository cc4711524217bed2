"""Runs any method with edge servers: every edge runs the method for its clients, and a cloud averages the edges.

The stages that this adds to a method are in `stages/edges.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.client.histogram import LabelHistogram
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.methods.composition.setting import Setting
from shoal.stages.edges import (
    CLOUD,
    EDGE_LABEL_STAGE,
    EDGES,
    AssignEdges,
    AverageEdgeModels,
    RunAtEdges,
    Topology,
    edge_states,
)
from shoal.stages.query import QueryClients
from shoal.stages.select import SelectCentralised
from shoal.stages.train import TrainLocally
from shoal.types import ClientId, Method, Params, ServerState, Stage

STAGES_WITHOUT_SHARED_MODEL = (SelectCentralised, TrainLocally)
"""Stages of methods whose clients share no model, so that an edge has nothing to average."""
TRAIN_STAGE = "train"


def with_edges(method: Method, setting: Setting, topology: Topology) -> Method:
    """Returns the method as every edge runs it for its clients.

    The cloud averages right after training, so that later stages, such as personalisation, start from its models.
    """
    if any(isinstance(stage, STAGES_WITHOUT_SHARED_MODEL) for stage in method.stages):
        raise UserError(
            f"method {method.name} cannot run with edges, because its clients share no model that edges could average; "
            "leave --edges out"
        )
    stages: list[Stage] = [AssignEdges(topology)]
    if topology.requires_labels:
        stages.insert(
            0, QueryClients(LabelHistogram(setting.model.num_classes, name=EDGE_LABEL_STAGE), name=EDGE_LABEL_STAGE)
        )
    for stage in method.stages:
        stages.append(RunAtEdges(stage))
        if stage.name == TRAIN_STAGE:
            stages.append(AverageEdgeModels(topology.cloud_every_rounds, setting.rounds))
    edge_notes = (
        ("clients report their label distributions to the server, which forms edges by them",)
        if topology.requires_labels
        else ()
    )
    return replace(
        method,
        stages=tuple(stages),
        models_for=_edge_models_for(method),
        models_for_inputs=None,  # the cloud does not know the clusters of an edge
        cluster_assigner=None,
        notes=(*method.notes, *edge_notes),
    )


def _edge_models_for(method: Method) -> Callable[[ServerState, ClientId | None], Mapping[str, Params]]:
    """Serves a client from its edge, and a client without an edge from the last average of the cloud."""
    # Clients are served one after the other from the same state, so the result for the last state is cached.
    last_edge_states: list[tuple[ServerState, dict[ClientId, int], list[ServerState]]] = []

    def models_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        if not last_edge_states or last_edge_states[0][0] is not state:
            edge_table = ClientTable.load(state, EDGES)
            edge_of_client = edge_table.to_dict("edge")
            last_edge_states[:] = [(state, edge_of_client, edge_states(state))]
        _, edge_of_client, states = last_edge_states[0]
        if not states:
            return method.models_for(state, client)
        if client is not None and client in edge_of_client:
            return method.models_for(states[edge_of_client[client]], client)
        cloud = state.memory[CLOUD]
        edge, models = states[int(cloud["reference"])], cloud["models"]
        # Edges may have formed other clusters since the last average, for which the cloud has no models.
        membership = {c: weights for c, weights in edge.membership.items() if len(weights) == len(models)}
        return method.models_for(replace(edge, models=models, membership=membership), None)

    return models_for
