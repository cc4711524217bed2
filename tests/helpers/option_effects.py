"""Checks that every option has an effect: each option is changed in a tiny run, and the bytes are compared.

    python tests/helpers/option_effects.py [--all] [--only METHOD ...] [--out FILE]

Without --all, every distinct option is tried once, in one method that has it. With --all, it is tried in every method.
An option must change the result of a run (models, state of the server and the clients, records, costs, privacy
statement) or the predictions of clients, or be refused with a sentence that gives the reason. Otherwise the exit code
is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from compositions import smallest_composition
from federations import tiny_federation
from safetensors.torch import save_file

from shoal import engine, tree
from shoal.cost.ledger import Ledger
from shoal.data import Federation
from shoal.errors import UserError
from shoal.experiment.assemble import Experiment, assemble
from shoal.experiment.job import Job
from shoal.experiment.result import privacy_guarantees
from shoal.fleet.plain import PlainFleet
from shoal.methods import METHODS, AvailableOption, available_options
from shoal.methods.composition.piece import pieces
from shoal.models import load_model
from shoal.types import UNLABELLED_SPLIT, Samples, ServerState

Options = Mapping[str, Mapping[str, Any]]
CLASSES, SHAPE = 4, (6,)
DEFAULT_JOB = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "eval_every": 9, "devices": "pi:0.5,phone:0.5"}


@dataclass(frozen=True)
class Case:
    """The run in which an option shows its effect, if it does not in the default run with a candidate value."""

    values: tuple[Any, ...] = ()  # values to try; empty if they are chosen by type and range
    options: Options = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    changes_data: bool = False  # whether clients get other data after the first round
    clients: int = 6
    seed: int = 4


@dataclass(frozen=True)
class OptionResult:
    """The outcome of changing one option."""

    method: str
    option: str
    value: Any
    outcome: str  # "changed", "refused" or "NO EFFECT"
    detail: str


def weights_file() -> str:
    """Writes initial weights to a file and returns its path."""
    path = Path(tempfile.gettempdir()) / "option-effects.safetensors"
    save_file(load_model("mlp", SHAPE, CLASSES).init(99), path)
    return str(path)


ALWAYS_SPLITTING = {
    "probe": {"first_round": 1, "every_rounds": 1, "min_effect": -10.0, "min_agreement": -1.0, "min_cluster_size": 1}
}  # whatever the probe measures
GATED = {**ALWAYS_SPLITTING, "gate": {"calibrate": True}}
SURVEYED = {"survey": {"warmup": 1, "every_rounds": 2}}
TIGHT_BUDGET = {"select": {"time_budget_fraction": 0.3, "quantile": 0.3, "waiting_bonus": 0.0}}
DENSITY = {"cluster": {"min_size": 1}, "serve": {"rule": "density"}}
NOISY = {"represent": {"noise_scale": 1.0}, "cluster": {"num_clusters": 3}}
SIX_ROUNDS = {"rounds": 6}
ALL_CLIENTS = {"rounds": 6, "cohort": 6}

CASES: dict[str, Case] = {
    "components.experts": Case(job={"rounds": 21, "eval_every": 30}),
    "represent.rerelease_threshold": Case(
        (0.1, 0.9), {"represent": {"noise_scale": 1.0, "every_rounds": 1}}, changes_data=True
    ),
    "labels.rerelease_threshold": Case(
        (0.1, 0.9), {"labels": {"noise_scale": 1.0, "every_rounds": 1}}, changes_data=True
    ),
    "represent.every_rounds": Case((1,)),
    "prior.every_rounds": Case((1,)),
    "train=adjusted prior.every_rounds": Case((1,), {"train": {"logit_adjustment": "on"}}),
    "probe.max_features": Case((40,), ALWAYS_SPLITTING),
    "probe.switch_margin": Case(
        (0.99,), {"probe": {**ALWAYS_SPLITTING["probe"], "max_clusters": 2}}, {"rounds": 4}, changes_data=True
    ),
    "probe.max_clusters": Case((1,), ALWAYS_SPLITTING),
    **{f"probe.{key}": Case(options=ALWAYS_SPLITTING) for key in ALWAYS_SPLITTING["probe"]},
    "estimate.min_gain_nats": Case((-100.0, 100.0)),
    "train.uniform_mix": Case(options={"train": {"logit_adjustment": "on"}}),
    "train.classwise_head": Case(options={"train": {"logit_adjustment": "on"}}),
    "hierfavg train.weighting": Case(job={"cohort": 6, "edges": 2}),
    "fedgroup train.weighting": Case(options={"cluster": {"num_clusters": 1}}),
    "train.decay": Case(options={"train": {"schedule": "cosine"}}),
    "gate.batch_size": Case((2,)),
    "gate.temperature": Case(options={"gate": {"calibrate": True}}),
    "gate.shortlist": Case((1,), {"gate": {"top": 1, "calibrate": True}}),
    **{
        f"{method} gate.{key}": case
        for method in ("shoal", "cluster=shift")
        for key, case in {
            **dict.fromkeys(
                ["hidden", "calibrate", "denoise", "prior", "mix", "epochs", "lr"], Case(options=ALWAYS_SPLITTING)
            ),
            "batch_size": Case((2,), ALWAYS_SPLITTING),
            "temperature": Case(options=GATED),
            "top": Case((1,), GATED),
            "shortlist": Case((1,), {**ALWAYS_SPLITTING, "gate": {"calibrate": True, "top": 1}}),
        }.items()
    },
    "personalise.lr_grid": Case(("0.5",), {"personalise": {"search": True, "epochs_grid": "1"}}),
    "personalise.epochs_grid": Case(("1",), {"personalise": {"search": True, "lr_grid": "0.1"}}),
    "update.decay": Case(options={"update": {"schedule": "cosine"}}),
    "apcsma share.num_samples": Case(options={"share": {"source": "clients"}}),
    **{
        f"{step}=contribution share.num_samples": Case(
            options={"share": {"source": "clients"}, "coefficients": {"steps": 1}}
        )
        for step in ("select", "aggregate")
    },
    "select.candidates": Case((3,)),
    "survey.warmup": Case((2,), SURVEYED, SIX_ROUNDS),
    "survey.every_rounds": Case((3,), SURVEYED, SIX_ROUNDS),
    "select.beta": Case((0.1,), {"survey": {"warmup": 1, "every_rounds": 5}}, SIX_ROUNDS),
    **{f"select.{key}": Case(options=SURVEYED, job=SIX_ROUNDS) for key in ("age_discount", "dimension", "noise")},
    "cluster.alpha": Case((1,)),
    "represent.weights": Case((weights_file(),)),
    "represent.layer": Case(("1",)),
    **{
        f"{method} cluster.merge": Case(
            (0.42,), {"cluster": {"noise_guard_ratio": 0.0, "merge": 0.05}}, clients=10, seed=0
        )
        for method in ("fedepc", "cluster=aidc")
    },
    "cluster.noise_guard_ratio": Case((100.0,)),
    "cluster.drift_ratio": Case((0.0, 1000.0), {"represent": {"every_rounds": 1}}, changes_data=True),
    "flacc cluster.min_size": Case((1,), {"cluster": {"patience": 1, "threshold": 0.5}}, ALL_CLIENTS),
    "cluster.remerge": Case(job=ALL_CLIENTS, seed=1),
    "cluster.restarts": Case(
        (1,), {"represent": {"noise_scale": 1.0}, "cluster": {"num_clusters": 4}}, clients=12, seed=2
    ),
    "cluster.centre": Case(options=NOISY, clients=12, seed=2),
    "cluster=similar cluster.centre": Case(
        options={"labels": {"noise_scale": 1.0}, "cluster": {"num_clusters": 3}}, clients=12, seed=2
    ),
    "cluster=similar cluster.restarts": Case(
        (1,), {"labels": {"noise_scale": 1.0}, "cluster": {"num_clusters": 4}}, clients=12, seed=2
    ),
    "cluster=repulsive cluster.swaps": Case(
        options={"labels": {"noise_scale": 1.0}, "cluster": {"num_clusters": 2}}, seed=0
    ),
    "represent=labels,cluster=dbscan cluster.radius": Case((0.05,), {"cluster": {"min_size": 1}}),
    "cluster=dbscan,represent=labels cluster.radius": Case((0.05,), {"cluster": {"min_size": 1}}),
    "cluster.swaps": Case(options={"represent": {"noise_scale": 1.0}, "cluster": {"num_clusters": 2}}),
    "ifca cluster.restarts": Case((2,), job={"rounds": 4}),
    "select.per_cluster": Case(options={"cluster": {"radius": 0.4}}, clients=10),
    **{f"serve.{key}": Case(options=DENSITY) for key in ("logit_weight", "covariance_shrinkage", "ridge")},
    "serve.max_features": Case((40,), DENSITY),
    "scmoe cluster.num_clusters": Case(job={"cohort": 6}),
    "scmoe cluster.explained_variance": Case(job={"cohort": 6}),
    "select.num_candidate_sets": Case((1,), TIGHT_BUDGET, SIX_ROUNDS, seed=0),
    "select.beta_scale": Case((50.0,), TIGHT_BUDGET, SIX_ROUNDS, seed=0),
    "select.centre": Case(options={"labels": {"noise_scale": 1.0}, "select": {"num_clusters": 3}}, seed=1, clients=8),
    "select.restarts": Case((1,), {"labels": {"noise_scale": 1.0}, "select": {"num_clusters": 4}}, seed=2, clients=8),
}


@cache
def federation(clients: int, shifted: bool = False) -> Federation:
    """Returns clients of unequal size, public samples and an unseen client. With `shifted`, clients have other data."""
    tiny = tiny_federation(clients + 1, SHAPE, CLASSES)
    data = {c: {s: tiny[c][s] for s in ("train", "val", "test")} for c in tiny}
    if shifted:
        for c in list(data)[::2]:
            data[c] = {split: Samples(-x, (y + 1) % CLASSES) for split, (x, y) in data[c].items()}
    central = tiny.central
    public = (central.x[:20] + 0.1, central.y[:20])
    return Federation.from_clients(data, central, tiny.classes, public_samples=public).hold_out((f"c{clients}",))


class CaseFleet(PlainFleet):
    """Clients whose data may change after a round."""

    def __init__(self, case: Case) -> None:
        super().__init__(federation(case.clients), {})
        self.case = case

    def after_round(self, record: engine.RoundRecord) -> None:
        """Changes the data of the clients if the case says so."""
        if self.case.changes_data:
            self.data = federation(self.case.clients, shifted=record.round % 2 == 1)


def run(method: str, case: Case, options: Options) -> dict[str, str]:
    """Returns a digest of each part of a run's result."""
    job = Job(
        method=method,
        seed=case.seed,
        fleet="plain",
        set=merge_options(case.options, options),
        **{**DEFAULT_JOB, **case.job},
    )
    experiment, fleet = assemble(job, method, federation(case.clients)), CaseFleet(case)
    result = engine.run(
        experiment.method,
        fleet,
        rounds=job.rounds,
        seed=job.seed,
        central_samples=experiment.federation.central,
        eval_every=job.eval_every,
        ledger=Ledger(experiment.costs),
        on_round=fleet.after_round,
    )
    state = result.state
    digests = {
        "models": tree_digest(state.models),
        "membership": tree_digest(state.membership),
        "memory": tree_digest(without_keys(state.memory)),
        "private": tree_digest(without_keys(fleet.private)),
        "records": text_digest([record.to_json() for record in result.rounds]),
        "costs": text_digest([entry.to_json() for entry in result.ledger.entries]),
        "privacy": text_digest(privacy_guarantees(experiment)),
    }
    with torch.no_grad():
        return digests | {"served": tree_digest(predictions(experiment, fleet, state))}


def predictions(experiment: Experiment, fleet: CaseFleet, state: ServerState) -> dict[str, torch.Tensor]:
    """Returns the logits of every client for its test samples, and of an unseen client in every way of serving it."""
    method = experiment.method
    ((unseen, (x, _)),) = experiment.federation.unseen.items()
    logits = {
        c: method.predict(method.models_for(state, c), fleet.private.get(c, {}), fleet.data[c]["test"].x)
        for c in fleet.roster()
    }
    models = method.models_for(state, None)
    logits["unseen"] = method.predict(models, {}, x)
    if method.models_for_inputs is not None:
        logits["assigned"] = method.predict(method.models_for_inputs(state, x), {}, x)
    if method.adaptation_program is not None:
        unseen_fleet = PlainFleet({unseen: {UNLABELLED_SPLIT: Samples(x, torch.zeros(len(x), dtype=torch.int64))}})
        unseen_fleet.execute_one(method.adaptation_program, unseen, engine.Task(models))
        logits["adapted"] = method.predict(models, unseen_fleet.private[unseen], x)
    return logits


def merge_options(first: Options, second: Options) -> dict[str, dict[str, Any]]:
    """Returns all options. For an option in both, the second one counts."""
    return {group: {**first.get(group, {}), **second.get(group, {})} for group in {**first, **second}}


def without_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the keys and masks of secure aggregation, because clients draw them from their own entropy."""
    flat = tree.flatten(values)
    return {name: x for name, x in flat.items() if "key" not in name and "mask" not in name}


def tree_digest(values: Mapping[str, Any]) -> str:
    """Returns a digest of the names and tensors of a tree."""
    content_hash = hashlib.sha256()
    for name, x in sorted(tree.flatten(values).items()):
        content_hash.update(f"{name} {x.dtype} {tuple(x.shape)}".encode() + x.cpu().contiguous().numpy().tobytes())
    return content_hash.hexdigest()


def text_digest(facts: Any) -> str:
    """Returns a digest of the text of any value."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@cache
def _baseline(method: str, key: str) -> dict[str, str]:
    return run(method, _cases_by_key[key], {})


_cases_by_key: dict[str, Case] = {}


def baseline(method: str, case: Case) -> dict[str, str]:
    """Returns the digests of the case without a changed option. Each case runs once."""
    key = repr(replace(case, values=()))
    _cases_by_key[key] = case
    return _baseline(method, key)


def candidate_values(option: AvailableOption) -> list[Any]:
    """Returns accepted values other than the default. The value that most probably has an effect comes first."""
    default, hint = option.default, option.type_hint
    if typing.get_origin(hint) is typing.Literal:
        return [x for x in typing.get_args(hint) if x != default]
    if hint is bool:
        return [not default]
    if hint is int:
        tries = (default // 2, default * 2, default + 1, 1, 2, 0)
    elif hint is float:
        tries = (default / 2, default * 2, 0.5, 1.5, 0.9, 0.0)
    else:
        return []
    return [x for x in dict.fromkeys(tries) if x != default and option.declaration.accepts(x)]


def find_case(method: str, path: str) -> Case:
    """Returns the case of the method and option, of one of its pieces and the option, or of the option."""
    keys = [f"{method} {path}", *(f"{piece} {path}" for piece in method.split(",")), path]
    return next((CASES[key] for key in keys if key in CASES), Case())


def try_option(method: str, path: str, option: AvailableOption, case: Case | None = None) -> OptionResult:
    """Changes one option. Several values are tried until one of them has an effect."""
    case, (group, key) = case or find_case(method, path), path.split(".")
    tries, refusals = list(case.values) or candidate_values(option)[:3], []
    for value in tries:
        try:
            changed = run(method, case, {group: {key: value}})
        except UserError as error:
            refusals.append(str(error))
            continue
        before = baseline(method, case)
        if differing := [part for part in changed if changed[part] != before[part]]:
            return OptionResult(method, path, value, "changed", ", ".join(differing))
    if tries and len(refusals) == len(tries):
        return OptionResult(method, path, tries, "refused", refusals[0])
    return OptionResult(method, path, tries, "NO EFFECT", "; ".join(refusals))


def compositions() -> Iterator[str]:
    """Yields every method by name, and every piece in its smallest composition."""
    yield from METHODS
    for step, classes in pieces().items():
        for name in classes:
            if smallest := smallest_composition(step, name):
                yield ",".join(f"{s}={n}" for s, n in smallest.items())


def all_pairs() -> Iterator[tuple[str, str, AvailableOption]]:
    """Yields every option of every composition."""
    for method in compositions():
        for group, keys in available_options(method).items():
            for key, option in keys.items():
                yield method, f"{group}.{key}", option


def distinct_pairs() -> list[tuple[str, str, AvailableOption]]:
    """Returns one method for every option. Options with the same name but different declarations are different."""
    pairs: dict[tuple[str, int], tuple[str, str, AvailableOption]] = {}
    for method, path, option in sorted(all_pairs(), key=lambda pair: pair[0] == "shoal"):  # the slowest comes last
        pairs.setdefault((path, id(option.declaration)), (method, path, option))
    return list(pairs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="Try every option of every method.")
    parser.add_argument("--only", nargs="*", default=[], help="Try only these methods or options.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for method, path, option in all_pairs() if arguments.all else distinct_pairs():
        if arguments.only and not {method, path} & set(arguments.only):
            continue
        result = try_option(method, path, option)
        rows.append(vars(result))
        print(f"{result.outcome:9} {method:12} {path:28} {result.value!r:>12}  {result.detail}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    without_effect = [row for row in rows if row["outcome"] == "NO EFFECT"]
    print(f"{len(rows)} options tried, {len(without_effect)} without effect")
    sys.exit(1 if without_effect else 0)


if __name__ == "__main__":
    main()
