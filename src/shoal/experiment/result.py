"""What is said of a run when it is done: result.json."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.client.histogram import LabelHistogram
from shoal.client.sparsity import MeasureSparsity
from shoal.client_table import ClientTable
from shoal.cost.ledger import ENERGY_PARTS, total_joules_by_part
from shoal.engine import Result, RoundTiming
from shoal.experiment.assemble import Experiment, num_public_samples
from shoal.rng import derive_seed
from shoal.stages.cluster import CLUSTER_STAGE, DiverseLabels, FormClusters
from shoal.types import ClientId, HasPrivacyGuarantee, Method, ServerState, Tree

log = logging.getLogger(__name__)

NOISED_DATA = {LabelHistogram: "label distributions", MeasureSparsity: "sparsity vectors"}
MEANINGLESS_EPSILON = 100  # an ε that large, at any δ
NUM_TIMED_CLIENTS, NUM_TIMED_SAMPLES, NUM_TIMED_REPEATS = (
    5,
    32,
    9,
)  # clients, rows and repetitions by which predictions are timed


def measure_predict_ms(experiment: Experiment, state: ServerState, private_states: Mapping[ClientId, Tree]) -> float:
    """By the clock: what it takes to answer a batch of rows with what a client is served, on one thread. The median of
    several turns, mean over a few clients."""
    federation, method = experiment.federation, experiment.method
    clients = list(federation)[:: max(1, len(federation) // NUM_TIMED_CLIENTS)][:NUM_TIMED_CLIENTS]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return fmean(
                _client_predict_ms(method, state, federation[c]["test"].x, c, private_states.get(c, {}))
                for c in clients
            )
    finally:
        torch.set_num_threads(threads)


def _client_predict_ms(method: Method, state: ServerState, x: Tensor, client: ClientId, private_state: Tree) -> float:
    models, indices = method.models_for(state, client), torch.arange(NUM_TIMED_SAMPLES) % max(1, len(x))
    batch, turns = x[indices.to(x.device)], []
    for _ in range(NUM_TIMED_REPEATS):
        begun = time.perf_counter()
        method.predict(models, private_state, batch)
        turns.append(time.perf_counter() - begun)
    return 1000 * median(turns)


def privacy_guarantees(experiment: Experiment) -> dict[str, Any]:
    """What noise protects in the whole run, as the program that adds it says of the tasks that a client may receive by
    the schedules, and what it is on if that is known. A method has one such program at most: guarantees of several are
    not added up."""
    sizes, tasks = experiment.federation.samples_per_client("train").tolist(), Counter[str]()
    for stage in experiment.method.stages:
        tasks.update(
            {program.name: stage.schedule.max_tasks_per_client(experiment.job.rounds) for program in stage.programs}
        )
    guarantees: dict[str, Any] = {}
    for name, program in experiment.method.programs.items():
        if isinstance(program, HasPrivacyGuarantee) and (promise := program.privacy_guarantee(sizes, tasks[name])):
            guarantees |= promise
            guarantees |= {"noise_on": NOISED_DATA[type(program)]} if type(program) in NOISED_DATA else {}
    return guarantees


def warn_about_weak_noise(guarantees: Mapping[str, Any]) -> None:
    if guarantees.get("record_epsilon", 0.0) > MEANINGLESS_EPSILON:
        log.warning(
            "noise: ε of one row is %s; above %d it says nothing (docs/privacy.md)",
            *(f"{guarantees['record_epsilon']:,.0f}", MEANINGLESS_EPSILON),
        )


def privacy_report(experiment: Experiment, state: ServerState, guarantees: Mapping[str, Any]) -> dict[str, Any]:
    """What was promised, and what the noise does to groups formed of label distributions."""
    if not guarantees:
        return {}
    found = dict(guarantees)
    for stage in (s for s in experiment.method.stages if isinstance(s, FormClusters) and s.column == "labels"):
        grouped = ClientTable.load(state, stage.name)
        if len(grouped):
            found |= _noise_effect(experiment, stage, grouped)
    return {"privacy": found}


def _noise_effect(experiment: Experiment, stage: FormClusters, cluster_table: ClientTable) -> dict[str, Any]:
    """Groups with noise beside those without. Mixed groups have no one right answer, so they are judged by what they
    are formed for (Eq. 3, on the true distributions), not by agreement."""
    from sklearn.metrics import adjusted_rand_score

    from shoal.clusterers.repulsive import objectives

    classes = len(experiment.federation.classes)
    counts = [
        torch.bincount(experiment.federation[c]["train"].y.cpu(), minlength=classes) for c in cluster_table.clients
    ]
    true_distributions = np.stack([(n / n.sum().clamp(min=1)).double().numpy() for n in counts])
    seed = derive_seed(experiment.job.seed, int(cluster_table["round"][0]), stage.name)
    with_noise, labels_without_noise = (
        cluster_table["group"].numpy(),
        stage.rule(true_distributions, seed, experiment.method.cohort_size),
    )
    if not isinstance(stage.rule, DiverseLabels):
        return {"ari": float(adjusted_rand_score(labels_without_noise, with_noise))}
    names = ("within", "between")
    noisy, clear = (
        dict(zip(names, objectives(true_distributions, labels), strict=True))
        for labels in (with_noise, labels_without_noise)
    )
    return {"objectives": noisy, "objectives_without_noise": clear}


def _cluster_joules(result: Result) -> dict[str, Any]:
    """Joules of the groups that a method formed, if it did: to choose from, or to share a model in (the one they belong
    to most)."""
    cluster_table = ClientTable.load(result.state, CLUSTER_STAGE)
    if "group" in cluster_table.columns:
        cluster_of_client = dict(zip(cluster_table.clients, cluster_table["group"].tolist(), strict=True))
    else:
        cluster_of_client = {c: int(weights.argmax()) for c, weights in result.state.membership.items()}
    if not cluster_of_client:
        return {}
    spent = result.ledger.joules_by_client()
    joules_by_cluster: dict[str, dict[str, float]] = {}
    for client, group in sorted(cluster_of_client.items()):  # one order of adding, whether resumed or not
        total = joules_by_cluster.setdefault(str(group), {"clients": 0, **dict.fromkeys(ENERGY_PARTS, 0.0)})
        total["clients"] += 1
        for part, joules in spent.get(client, {}).items():
            total[part] += joules
    return {"joules_of_groups": dict(sorted(joules_by_cluster.items(), key=lambda item: int(item[0])))}


def _clusters(experiment: Experiment, result: Result) -> dict[str, Any]:
    """Who is in the group of which model, and how well that agrees with groups that were planted."""
    models_of_client, planted = result.clusters, experiment.federation.planted_groups
    if not models_of_client:  # all in one, which tells several planted groups in no way apart
        return {} if planted is None else {"groups_ari": float(len(set(planted.values())) == 1)}
    members = [
        {"expert": name, "clients": [c for c in experiment.federation if name in models_of_client.get(c, ())]}
        for name in sorted(result.state.models)
    ]
    if planted is None:
        return {"groups": members}
    from sklearn.metrics import adjusted_rand_score

    nearest = {c: int(result.state.membership[c].argmax()) for c in models_of_client}
    agreement = adjusted_rand_score([planted[c] for c in nearest], list(nearest.values()))
    return {"groups": members, "groups_ari": float(agreement)}


def _edges(experiment: Experiment, result: Result) -> dict[str, Any]:
    """Who was under which edge, and what edges and the cloud sent each other, both ways."""
    if not result.edges:
        return {}
    places = experiment.federation.edge_of_client if experiment.job.edges in (None, "place") else None
    members = [
        {"edge": edge, **({"name": places[clients[0]]} if places else {}), "clients": clients}
        for edge, clients in result.edges.items()
    ]
    return {"edges": members, "bytes_long": sum(r.bytes_edge_cloud or 0 for r in result.rounds)}


def summarise_run(experiment: Experiment, result: Result, path: Path, clock: RoundTiming) -> dict[str, Any]:
    job, server = experiment.job, experiment.costs.server
    joules = total_joules_by_part(result.ledger.entries)
    server_joules = clock.server_s * server.active_w
    return {
        "method": job.method,
        "seed": job.seed,
        "rounds": job.rounds,
        "data": job.data,
        "partition": job.partition,
        "clients": job.clients,
        "public": num_public_samples(experiment.federation),
        **({"unseen": job.unseen} if job.unseen else {}),
        "cohort": experiment.cohort,
        "model": job.model,
        "parameters": experiment.model.num_parameters,
        "fleet": job.fleet,
        **result.evaluation.summary(),
        "train_loss": result.rounds[-1].metrics.get("train.loss"),
        "updates": sum(int((p.bytes_up > 0).sum()) for p in result.ledger.entries if p.stage == "train"),
        "bytes_up": sum(r.bytes_up for r in result.rounds),
        "bytes_down": sum(r.bytes_down for r in result.rounds),
        "flops": sum(r.flops for r in result.rounds),
        "joules": joules | {"server": server_joules, "total": sum(joules.values()) + server_joules},
        "joules_of_clients": {k: joules[k] for k in ENERGY_PARTS}
        | {"kind": "modelled", "devices": job.devices, "link": job.link},
        "joules_of_server": {
            "total": server_joules,
            "seconds": clock.server_s,
            "watts": server.active_w,
            "kind": "measured seconds x assumed watts",
        },
        **({"notes": list(experiment.method.notes)} if experiment.method.notes else {}),
        **_clusters(experiment, result),
        **_cluster_joules(result),
        **_edges(experiment, result),
        "sim_time_s": sum(r.sim_time_s for r in result.rounds),
        "rounds_done": len(result.rounds),
        "stopped": result.stop_reason,
        "late": sum(r.num_late_reports for r in result.rounds),
        "left": sum(len(r.depleted_clients) for r in result.rounds),
        "wall_s": round(clock.wall_s, 3),
        "run_dir": str(path),
    }
