"""Summarises a finished run: the content of result.json."""

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
MEANINGLESS_EPSILON = 100  # so large an ε means nothing, for any δ
NUM_TIMED_CLIENTS, NUM_TIMED_SAMPLES, NUM_TIMED_REPEATS = 5, 32, 9  # for the time of a prediction


def measure_predict_ms(experiment: Experiment, state: ServerState, private_states: Mapping[ClientId, Tree]) -> float:
    """Returns the milliseconds in which a client predicts a batch of samples on one thread.

    The value is the mean over a few clients of the median over several repeats.
    """
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
    batch, durations_s = x[indices.to(x.device)], []
    for _ in range(NUM_TIMED_REPEATS):
        start_s = time.perf_counter()
        method.predict(models, private_state, batch)
        durations_s.append(time.perf_counter() - start_s)
    return 1000 * median(durations_s)


def privacy_guarantees(experiment: Experiment) -> dict[str, Any]:
    """Returns the privacy guarantees of the noise for the whole run, and the data that the noise is added to.

    The program that adds the noise computes them from the largest number of tasks that the schedules give to a client.
    A method has at most one such program, so guarantees of several programs are not composed.
    """
    sizes, tasks = experiment.federation.samples_per_client("train").tolist(), Counter[str]()
    for stage in experiment.method.stages:
        tasks.update(
            {program.name: stage.schedule.max_tasks_per_client(experiment.job.rounds) for program in stage.programs}
        )
    guarantees: dict[str, Any] = {}
    for name, program in experiment.method.programs.items():
        if isinstance(program, HasPrivacyGuarantee) and (guarantee := program.privacy_guarantee(sizes, tasks[name])):
            guarantees |= guarantee
            guarantees |= {"noise_on": NOISED_DATA[type(program)]} if type(program) in NOISED_DATA else {}
    return guarantees


def warn_about_weak_noise(guarantees: Mapping[str, Any]) -> None:
    """Warns if ε is so large that the noise protects nothing."""
    if guarantees.get("record_epsilon", 0.0) > MEANINGLESS_EPSILON:
        log.warning(
            "The noise gives a single sample ε = %s. An ε above %d means no protection (docs/privacy.md).",
            *(f"{guarantees['record_epsilon']:,.0f}", MEANINGLESS_EPSILON),
        )


def privacy_report(experiment: Experiment, state: ServerState, guarantees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the privacy guarantees, and the effect of the noise on clusters of label distributions."""
    if not guarantees:
        return {}
    facts = dict(guarantees)
    for stage in (s for s in experiment.method.stages if isinstance(s, FormClusters) and s.column == "labels"):
        cluster_table = ClientTable.load(state, stage.name)
        if len(cluster_table):
            facts |= _noise_effect(experiment, stage, cluster_table)
    return {"privacy": facts}


def _noise_effect(experiment: Experiment, stage: FormClusters, cluster_table: ClientTable) -> dict[str, Any]:
    """Compares the clusters with noise with those without noise.

    Diverse clusters have no single right answer, so they are compared by their objective (Eq. 3, on the true
    distributions) and not by their agreement.
    """
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
    noisy, noiseless = (
        dict(zip(names, objectives(true_distributions, labels), strict=True))
        for labels in (with_noise, labels_without_noise)
    )
    return {"objectives": noisy, "objectives_without_noise": noiseless}


def _cluster_joules(result: Result) -> dict[str, Any]:
    """Returns the joules of each cluster that a method formed.

    The clusters are those that clients are selected from, else those that share a model. A client counts in the cluster
    with its largest weight.
    """
    cluster_table = ClientTable.load(result.state, CLUSTER_STAGE)
    if "group" in cluster_table.columns:
        cluster_of_client = cluster_table.to_dict("group")
    else:
        cluster_of_client = {c: int(weights.argmax()) for c, weights in result.state.membership.items()}
    if not cluster_of_client:
        return {}
    spent = result.ledger.joules_by_client()
    joules_by_cluster: dict[str, dict[str, float]] = {}
    for client, cluster in sorted(cluster_of_client.items()):  # the same order of summation in a resumed run
        total = joules_by_cluster.setdefault(str(cluster), {"num_clients": 0, **dict.fromkeys(ENERGY_PARTS, 0.0)})
        total["num_clients"] += 1
        for part, joules in spent.get(client, {}).items():
            total[part] += joules
    return {"cluster_joules": dict(sorted(joules_by_cluster.items(), key=lambda item: int(item[0])))}


def _clusters(experiment: Experiment, result: Result) -> dict[str, Any]:
    """Returns the clients of each model, and how well these clusters agree with planted groups."""
    models_of_client, planted = result.clusters, experiment.federation.planted_groups
    if not models_of_client:  # one cluster, which separates no planted groups
        return {} if planted is None else {"clusters_ari": float(len(set(planted.values())) == 1)}
    members = [
        {"model": name, "clients": [c for c in experiment.federation if name in models_of_client.get(c, ())]}
        for name in sorted(result.state.models)
    ]
    if planted is None:
        return {"clusters": members}
    from sklearn.metrics import adjusted_rand_score

    cluster_of_client = {c: int(result.state.membership[c].argmax()) for c in models_of_client}
    agreement = adjusted_rand_score([planted[c] for c in cluster_of_client], list(cluster_of_client.values()))
    return {"clusters": members, "clusters_ari": float(agreement)}


def _edges(experiment: Experiment, result: Result) -> dict[str, Any]:
    """Returns the clients of each edge server, and the bytes between edge servers and cloud in both directions."""
    if not result.edges:
        return {}
    edge_names = experiment.federation.edge_of_client if experiment.job.edges in (None, "column") else None
    members = [
        {"edge": edge, **({"name": edge_names[clients[0]]} if edge_names else {}), "clients": clients}
        for edge, clients in result.edges.items()
    ]
    return {"edges": members, "bytes_edge_cloud": sum(r.bytes_edge_cloud or 0 for r in result.rounds)}


def summarise_run(experiment: Experiment, result: Result, path: Path, clock: RoundTiming) -> dict[str, Any]:
    """Returns the content of result.json. docs/runs.md describes its keys."""
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
        "num_public_samples": num_public_samples(experiment.federation),
        **({"num_unseen_clients": job.unseen} if job.unseen else {}),
        "cohort": experiment.cohort,
        "model": job.model,
        "num_parameters": experiment.model.num_parameters,
        "fleet": job.fleet,
        **result.evaluation.summary(),
        "train_loss": result.rounds[-1].metrics.get("train.loss"),
        "num_client_updates": sum(int((p.bytes_up > 0).sum()) for p in result.ledger.entries if p.stage == "train"),
        "bytes_up": sum(r.bytes_up for r in result.rounds),
        "bytes_down": sum(r.bytes_down for r in result.rounds),
        "flops": sum(r.flops for r in result.rounds),
        "joules": joules | {"server": server_joules, "total": sum(joules.values()) + server_joules},
        "client_joules": {k: joules[k] for k in ENERGY_PARTS}
        | {"kind": "modelled", "devices": job.devices, "link": job.link},
        "server_joules": {
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
        "completed_rounds": len(result.rounds),
        "stop_reason": result.stop_reason,
        "num_late_reports": sum(r.num_late_reports for r in result.rounds),
        "num_rejected_reports": sum(len(r.rejected) for r in result.rounds),
        "num_depleted_clients": sum(len(r.depleted_clients) for r in result.rounds),
        "wall_s": round(clock.wall_s, 3),
        "run_dir": str(path),
    }
