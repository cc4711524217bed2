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
from shoal.experiment.assemble import Bench, public_rows
from shoal.rng import derive_seed
from shoal.stages.cluster import CLUSTER_STAGE, DiverseLabels, FormClusters
from shoal.types import ClientId, HasPrivacyGuarantee, Method, ServerState, Tree

log = logging.getLogger(__name__)

NOISE_ON = {LabelHistogram: "label distributions", MeasureSparsity: "sparsity vectors"}
SAYS_NOTHING = 100  # an ε that large, at any δ
ANSWERING, BATCH_ROWS, TURNS = 5, 32, 9  # clients, rows and repetitions by which predictions are timed


def predict_ms(bench: Bench, state: ServerState, private: Mapping[ClientId, Tree]) -> float:
    """By the clock: what it takes to answer a batch of rows with what a client is served, on one thread. The median of
    several turns, mean over a few clients."""
    federation, method = bench.federation, bench.method
    clients = list(federation)[:: max(1, len(federation) // ANSWERING)][:ANSWERING]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return fmean(_answer_ms(method, state, federation[c]["test"].x, c, private.get(c, {})) for c in clients)
    finally:
        torch.set_num_threads(threads)


def _answer_ms(method: Method, state: ServerState, x: Tensor, client: ClientId, private: Tree) -> float:
    models, rows = method.models_for(state, client), torch.arange(BATCH_ROWS) % max(1, len(x))
    batch, turns = x[rows.to(x.device)], []
    for _ in range(TURNS):
        begun = time.perf_counter()
        method.predict(models, private, batch)
        turns.append(time.perf_counter() - begun)
    return 1000 * median(turns)


def promised(bench: Bench) -> dict[str, Any]:
    """What noise protects in the whole run, as the program that adds it says of the tasks that a client may receive by
    the schedules, and what it is on if that is known. A method has one such program at most: guarantees of several are
    not added up."""
    sizes, tasks = bench.federation.samples_per_client("train").tolist(), Counter[str]()
    for stage in bench.method.stages:
        tasks.update(
            {program.name: stage.schedule.max_tasks_per_client(bench.job.rounds) for program in stage.programs}
        )
    found: dict[str, Any] = {}
    for name, program in bench.method.programs.items():
        if isinstance(program, HasPrivacyGuarantee) and (promise := program.privacy_guarantee(sizes, tasks[name])):
            found |= promise
            found |= {"noise_on": NOISE_ON[type(program)]} if type(program) in NOISE_ON else {}
    return found


def warn_of_little_noise(promise: Mapping[str, Any]) -> None:
    if promise.get("record_epsilon", 0.0) > SAYS_NOTHING:
        log.warning(
            "noise: ε of one row is %s; above %d it says nothing (docs/privacy.md)",
            *(f"{promise['record_epsilon']:,.0f}", SAYS_NOTHING),
        )


def protection(bench: Bench, state: ServerState, promise: Mapping[str, Any]) -> dict[str, Any]:
    """What was promised, and what the noise does to groups formed of label distributions."""
    if not promise:
        return {}
    found = dict(promise)
    for stage in (s for s in bench.method.stages if isinstance(s, FormClusters) and s.column == "labels"):
        grouped = ClientTable.load(state, stage.name)
        if len(grouped):
            found |= _blur(bench, stage, grouped)
    return {"privacy": found}


def _blur(bench: Bench, stage: FormClusters, grouped: ClientTable) -> dict[str, Any]:
    """Groups with noise beside those without. Mixed groups have no one right answer, so they are judged by what they
    are formed for (Eq. 3, on the true distributions), not by agreement."""
    from sklearn.metrics import adjusted_rand_score

    from shoal.clusterers.repulsive import objectives

    classes = len(bench.federation.classes)
    counts = [torch.bincount(bench.federation[c]["train"].y.cpu(), minlength=classes) for c in grouped.clients]
    true = np.stack([(n / n.sum().clamp(min=1)).double().numpy() for n in counts])
    seed = derive_seed(bench.job.seed, int(grouped["round"][0]), stage.name)
    with_noise, without = grouped["group"].numpy(), stage.rule(true, seed, bench.method.cohort_size)
    if not isinstance(stage.rule, DiverseLabels):
        return {"ari": float(adjusted_rand_score(without, with_noise))}
    names = ("within", "between")
    noisy, clear = (dict(zip(names, objectives(true, labels), strict=True)) for labels in (with_noise, without))
    return {"objectives": noisy, "objectives_without_noise": clear}


def _by_group(result: Result) -> dict[str, Any]:
    """Joules of the groups that a method formed, if it did: to choose from, or to share a model in (the one they belong
    to most)."""
    grouped = ClientTable.load(result.state, CLUSTER_STAGE)
    if "group" in grouped.columns:
        groups = dict(zip(grouped.clients, grouped["group"].tolist(), strict=True))
    else:
        groups = {c: int(weights.argmax()) for c, weights in result.state.membership.items()}
    if not groups:
        return {}
    spent = result.ledger.by_client()
    found: dict[str, dict[str, float]] = {}
    for client, group in sorted(groups.items()):  # one order of adding, whether resumed or not
        total = found.setdefault(str(group), {"clients": 0, **dict.fromkeys(ENERGY_PARTS, 0.0)})
        total["clients"] += 1
        for part, joules in spent.get(client, {}).items():
            total[part] += joules
    return {"joules_of_groups": dict(sorted(found.items(), key=lambda item: int(item[0])))}


def _groups(bench: Bench, result: Result) -> dict[str, Any]:
    """Who is in the group of which model, and how well that agrees with groups that were planted."""
    of, planted = result.groups, bench.federation.planted_groups
    if not of:  # all in one, which tells several planted groups in no way apart
        return {} if planted is None else {"groups_ari": float(len(set(planted.values())) == 1)}
    members = [
        {"expert": name, "clients": [c for c in bench.federation if name in of.get(c, ())]}
        for name in sorted(result.state.models)
    ]
    if planted is None:
        return {"groups": members}
    from sklearn.metrics import adjusted_rand_score

    nearest = {c: int(result.state.membership[c].argmax()) for c in of}
    agreement = adjusted_rand_score([planted[c] for c in nearest], list(nearest.values()))
    return {"groups": members, "groups_ari": float(agreement)}


def _edges(bench: Bench, result: Result) -> dict[str, Any]:
    """Who was under which edge, and what edges and the cloud sent each other, both ways."""
    if not result.edges:
        return {}
    places = bench.federation.edge_of_client if bench.job.edges in (None, "place") else None
    members = [
        {"edge": edge, **({"name": places[clients[0]]} if places else {}), "clients": clients}
        for edge, clients in result.edges.items()
    ]
    return {"edges": members, "bytes_long": sum(r.bytes_long or 0 for r in result.records)}


def summarise(bench: Bench, result: Result, path: Path, clock: RoundTiming) -> dict[str, Any]:
    job, server = bench.job, bench.costs.server
    joules = total_joules_by_part(result.ledger.entries)
    server_joules = clock.server_s * server.active_w
    return {
        "method": job.method,
        "seed": job.seed,
        "rounds": job.rounds,
        "data": job.data,
        "partition": job.partition,
        "clients": job.clients,
        "public": public_rows(bench.federation),
        **({"unseen": job.unseen} if job.unseen else {}),
        "cohort": bench.cohort,
        "model": job.model,
        "parameters": bench.model.num_parameters,
        "fleet": job.fleet,
        **result.evaluation.figures(),
        "train_loss": result.records[-1].metrics.get("train.loss"),
        "updates": sum(int((p.bytes_up > 0).sum()) for p in result.ledger.entries if p.stage == "train"),
        "bytes_up": sum(r.bytes_up for r in result.records),
        "bytes_down": sum(r.bytes_down for r in result.records),
        "flops": sum(r.flops for r in result.records),
        "joules": joules | {"server": server_joules, "total": sum(joules.values()) + server_joules},
        "joules_of_clients": {k: joules[k] for k in ENERGY_PARTS}
        | {"kind": "modelled", "devices": job.devices, "link": job.link},
        "joules_of_server": {
            "total": server_joules,
            "seconds": clock.server_s,
            "watts": server.active_w,
            "kind": "measured seconds x assumed watts",
        },
        **({"notes": list(bench.method.notes)} if bench.method.notes else {}),
        **_groups(bench, result),
        **_by_group(result),
        **_edges(bench, result),
        "sim_time_s": sum(r.sim_time_s for r in result.records),
        "rounds_done": len(result.records),
        "stopped": result.stopped,
        "late": sum(r.late for r in result.records),
        "left": sum(len(r.left) for r in result.records),
        "wall_s": round(clock.wall_s, 3),
        "run_dir": str(path),
    }
