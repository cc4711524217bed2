"""Any method under edges: clients, edge servers, a cloud."""

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

STAGES_WITHOUT_SHARED_MODEL = (
    SelectCentralised,
    TrainLocally,
)  # stages of methods in which there is nothing for an edge to average
TRAIN_STAGE = "train"


def with_edges(method: Method, setting: Setting, topology: Topology) -> Method:
    """The method, played by every edge for its clients. The cloud comes right after the training, so
    that what a method does then, such as to personalise, starts from the cloud's models."""
    if any(isinstance(stage, STAGES_WITHOUT_SHARED_MODEL) for stage in method.stages):
        raise UserError(
            f"edges are of no use to method {method.name}: its clients share no model that edges could average"
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
        ("clients tell the server their label distributions, by which edges are formed",)
        if topology.requires_labels
        else ()
    )
    return replace(
        method,
        stages=tuple(stages),
        models_for=_edge_models_for(method),
        models_for_inputs=None,  # the cloud knows no edge's groups
        cluster_assigner=None,
        notes=(*method.notes, *edge_notes),
    )


def _edge_models_for(method: Method) -> Callable[[ServerState, ClientId | None], Mapping[str, Params]]:
    """A client is served by its edge; who has none, by the cloud, as the cloud was when edges last met there."""
    last_edge_states: list[
        tuple[ServerState, dict[ClientId, int], list[ServerState]]
    ] = []  # of the last state: all ask in a row

    def models_for(state: ServerState, client: ClientId | None) -> Mapping[str, Params]:
        if not last_edge_states or last_edge_states[0][0] is not state:
            edge_table = ClientTable.load(state, EDGES)
            edge_of_client = (
                dict(zip(edge_table.clients, edge_table["edge"].tolist(), strict=True)) if len(edge_table) else {}
            )
            last_edge_states[:] = [(state, edge_of_client, edge_states(state))]
        _, edge_of_client, edge_states = last_edge_states[0]
        if not edge_states:
            return method.models_for(state, client)
        if client is not None and client in edge_of_client:
            return method.models_for(edge_states[edge_of_client[client]], client)
        cloud = state.memory[CLOUD]
        edge, models = edge_states[int(cloud["reference"])], cloud["models"]
        # Edges may have formed other clusters since they met, which the models of the cloud do not belong to.
        membership = {c: weights for c, weights in edge.membership.items() if len(weights) == len(models)}
        return method.models_for(replace(edge, models=models, membership=membership), None)

    return models_for
