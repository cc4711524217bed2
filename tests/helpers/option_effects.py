"""Does every option do something? Each option of a method is changed once in a tiny run, and its bytes are compared.

    python tests/helpers/option_effects.py [--all] [--only METHOD ...] [--out FILE]

Without --all every distinct option is looked at once, in one method that has it; with --all in every method. An option
must change what a run leaves (models, what server and clients keep, records, costs, privacy statement) or what clients
are served, or be refused with a sentence that says why it has no effect. The exit code is 1 where it is neither.
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
    """In what run an option shows its effect, where the usual one with a value chosen by itself does not."""

    values: tuple[Any, ...] = ()  # to try; none: chosen by type and range
    options: Options = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    changes_data: bool = False  # whether clients have other data after the first round
    clients: int = 6
    seed: int = 4


@dataclass(frozen=True)
class OptionResult:
    """What came of changing one option."""

    method: str
    option: str
    value: Any
    outcome: str  # "changed", "refused" or "NO EFFECT"
    detail: str


def weights_file() -> str:
    path = Path(tempfile.gettempdir()) / "option-effects.safetensors"
    save_file(load_model("mlp", SHAPE, CLASSES).init(99), path)
    return str(path)


ALWAYS_SPLITTING = {
    "probe": {"at": 1, "every": 1, "threshold": -10.0, "agreement": -1.0, "smallest": 1}
}  # whatever it measures
WEIGHED = {**ALWAYS_SPLITTING, "gate": {"calibrate": True}}
SURVEYED = {"survey": {"warmup": 1, "every": 2}}
TIGHT = {"select": {"share": 0.3, "quantile": 0.3, "patience": 0.0}}
DENSITY = {"cluster": {"smallest": 1}, "serve": {"rule": "density"}}
MIXED = {"represent": {"gamma": 1.0}, "cluster": {"groups": 3}}
LONG, ALL = {"rounds": 6}, {"rounds": 6, "cohort": 6}

CASES: dict[str, Case] = {
    "components.experts": Case(job={"rounds": 21, "eval_every": 30}),
    "represent.anew": Case((0.1, 0.9), {"represent": {"gamma": 1.0, "every": 1}}, changes_data=True),
    "labels.anew": Case((0.1, 0.9), {"labels": {"gamma": 1.0, "every": 1}}, changes_data=True),
    "represent.every": Case((1,)),
    "prior.every": Case((1,)),
    "train=adjusted prior.every": Case((1,), {"train": {"adjust": "on"}}),
    "probe.width": Case((40,), ALWAYS_SPLITTING),
    "probe.stay": Case((0.99,), {"probe": {**ALWAYS_SPLITTING["probe"], "most": 2}}, {"rounds": 4}, changes_data=True),
    "probe.most": Case((1,), ALWAYS_SPLITTING),
    **{f"probe.{key}": Case(options=ALWAYS_SPLITTING) for key in ("at", "every", "threshold", "agreement", "smallest")},
    "estimate.guard": Case((-100.0, 100.0)),
    "train.lam": Case(options={"train": {"adjust": "on"}}),
    "train.head": Case(options={"train": {"adjust": "on"}}),
    "hierfavg train.weighting": Case(job={"cohort": 6, "edges": 2}),
    "fedgroup train.weighting": Case(options={"cluster": {"groups": 1}}),
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
            "temperature": Case(options=WEIGHED),
            "top": Case((1,), WEIGHED),
            "shortlist": Case((1,), {**ALWAYS_SPLITTING, "gate": {"calibrate": True, "top": 1}}),
        }.items()
    },
    "personalise.rates": Case(("0.5",), {"personalise": {"tune": True, "passes": "1"}}),
    "personalise.passes": Case(("1",), {"personalise": {"tune": True, "rates": "0.1"}}),
    "update.decay": Case(options={"update": {"schedule": "cosine"}}),
    "apcsma share.rows": Case(options={"share": {"rows_of": "clients"}}),
    **{
        f"{step}=contribution share.rows": Case(options={"share": {"rows_of": "clients"}, "learn": {"steps": 1}})
        for step in ("select", "aggregate")
    },
    "select.candidates": Case((3,)),
    "survey.warmup": Case((2,), SURVEYED, LONG),
    "survey.every": Case((3,), SURVEYED, LONG),
    "select.beta": Case((0.1,), {"survey": {"warmup": 1, "every": 5}}, LONG),
    **{f"select.{key}": Case(options=SURVEYED, job=LONG) for key in ("forget", "dimension", "noise")},
    "cluster.alpha": Case((1,)),
    "represent.weights": Case((weights_file(),)),
    "represent.layer": Case(("1",)),
    **{
        f"{method} cluster.merge": Case((0.42,), {"cluster": {"guard": 0.0, "merge": 0.05}}, clients=10, seed=0)
        for method in ("fedepc", "cluster=aidc")
    },
    "cluster.guard": Case((100.0,)),
    "cluster.drift": Case((0.0, 1000.0), {"represent": {"every": 1}}, changes_data=True),
    "flacc cluster.smallest": Case((1,), {"cluster": {"patience": 1, "threshold": 0.5}}, ALL),
    "cluster.revise": Case(job=ALL, seed=1),
    "cluster.restarts": Case((1,), {"represent": {"gamma": 1.0}, "cluster": {"groups": 4}}, clients=12, seed=2),
    "cluster.centre": Case(options=MIXED, clients=12, seed=2),
    "cluster=similar cluster.centre": Case(
        options={"labels": {"gamma": 1.0}, "cluster": {"groups": 3}}, clients=12, seed=2
    ),
    "cluster=similar cluster.restarts": Case(
        (1,), {"labels": {"gamma": 1.0}, "cluster": {"groups": 4}}, clients=12, seed=2
    ),
    "cluster=repulsive cluster.swaps": Case(options={"labels": {"gamma": 1.0}, "cluster": {"groups": 2}}, seed=0),
    "represent=labels,cluster=dbscan cluster.reach": Case((0.05,), {"cluster": {"smallest": 1}}),
    "cluster=dbscan,represent=labels cluster.reach": Case((0.05,), {"cluster": {"smallest": 1}}),
    "cluster.swaps": Case(options={"represent": {"gamma": 1.0}, "cluster": {"groups": 2}}),
    "ifca cluster.restarts": Case((2,), job={"rounds": 4}),
    "select.take": Case(options={"cluster": {"reach": 0.4}}, clients=10),
    **{f"serve.{key}": Case(options=DENSITY) for key in ("trust", "shrink", "ridge")},
    "serve.width": Case((40,), DENSITY),
    "scmoe cluster.clusters": Case(job={"cohort": 6}),
    "scmoe cluster.share": Case(job={"cohort": 6}),
    "select.sets": Case((1,), TIGHT, LONG, seed=0),
    "select.beta_scale": Case((50.0,), TIGHT, LONG, seed=0),
    "groups.centre": Case(options={"labels": {"gamma": 1.0}, "groups": {"groups": 3}}, seed=1, clients=8),
    "groups.restarts": Case((1,), {"labels": {"gamma": 1.0}, "groups": {"groups": 4}}, seed=2, clients=8),
}


@cache
def federation(clients: int, shifted: bool = False) -> Federation:
    """Clients of unequal size with public samples and a client that is unseen, or the same clients with other data."""
    tiny = tiny_federation(clients + 1, SHAPE, CLASSES)
    data = {c: {s: tiny[c][s] for s in ("train", "val", "test")} for c in tiny}
    if shifted:
        for c in list(data)[::2]:
            data[c] = {split: Samples(-x, (y + 1) % CLASSES) for split, (x, y) in data[c].items()}
    central = tiny.central
    public = (central.x[:20] + 0.1, central.y[:20])
    return Federation.from_clients(data, central, tiny.classes, public_samples=public).hold_out((f"c{clients}",))


class CaseFleet(PlainFleet):
    """Clients whose data may be others after a round."""

    def __init__(self, case: Case) -> None:
        super().__init__(federation(case.clients), {})
        self.case = case

    def after_round(self, record: engine.RoundRecord) -> None:
        if self.case.changes_data:
            self.data = federation(self.case.clients, shifted=record.round % 2 == 1)


def run(method: str, case: Case, options: Options) -> dict[str, str]:
    """A digest of each thing that a run leaves and serves."""
    job = Job(
        method=method,
        seed=case.seed,
        fleet="plain",
        set=merge_options(case.options, options),
        **{**DEFAULT_JOB, **case.job},
    )
    bench, fleet = assemble(job, method, federation(case.clients)), CaseFleet(case)
    result = engine.run(
        bench.method,
        fleet,
        rounds=job.rounds,
        seed=job.seed,
        central_samples=bench.federation.central,
        eval_every=job.eval_every,
        ledger=Ledger(bench.costs),
        on_round=fleet.after_round,
    )
    state = result.state
    left = {
        "models": tree_digest(state.models),
        "membership": tree_digest(state.membership),
        "memory": tree_digest(without_keys(state.memory)),
        "private": tree_digest(without_keys(fleet.private)),
        "records": text_digest([record.to_json() for record in result.rounds]),
        "costs": text_digest([page.to_json() for page in result.ledger.entries]),
        "privacy": text_digest(privacy_guarantees(bench)),
    }
    with torch.no_grad():
        return left | {"served": tree_digest(served(bench, fleet, state))}


def served(bench: Experiment, fleet: CaseFleet, state: ServerState) -> dict[str, torch.Tensor]:
    """The logits that every client predicts its test samples with, and a client that never trained, in every way."""
    method = bench.method
    ((unseen, (x, _)),) = bench.federation.unseen.items()
    found = {
        c: method.predict(method.models_for(state, c), fleet.private.get(c, {}), fleet.data[c]["test"].x)
        for c in fleet.roster()
    }
    models = method.models_for(state, None)
    found["unseen"] = method.predict(models, {}, x)
    if method.models_for_inputs is not None:
        found["assigned"] = method.predict(method.models_for_inputs(state, x), {}, x)
    if method.adaptation_program is not None:
        alone = PlainFleet({unseen: {UNLABELLED_SPLIT: Samples(x, torch.zeros(len(x), dtype=torch.int64))}})
        alone.execute_one(method.adaptation_program, unseen, engine.Task(models))
        found["adapted"] = method.predict(models, alone.private[unseen], x)
    return found


def merge_options(first: Options, second: Options) -> dict[str, dict[str, Any]]:
    return {group: {**first.get(group, {}), **second.get(group, {})} for group in {**first, **second}}


def without_keys(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Without what clients draw from their own entropy: keys of secure aggregation."""
    flat = tree.flatten(kept)
    return {name: x for name, x in flat.items() if "key" not in name and "mask" not in name}


def tree_digest(values: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name, x in sorted(tree.flatten(values).items()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode() + x.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def text_digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@cache
def _baseline(method: str, key: str) -> dict[str, str]:
    return run(method, _cases_by_key[key], {})


_cases_by_key: dict[str, Case] = {}


def baseline(method: str, case: Case) -> dict[str, str]:
    """The run of a case as it is, made once."""
    key = repr(replace(case, values=()))
    _cases_by_key[key] = case
    return _baseline(method, key)


def candidate_values(option: AvailableOption) -> list[Any]:
    """Accepted values other than the default, the likeliest to have an effect first."""
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
    """The case of the method, of one of its pieces, or of the option."""
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
    """Every method by name, and every piece with only those others that it cannot do without."""
    yield from METHODS
    for step, found in pieces().items():
        for name in found:
            if smallest := smallest_composition(step, name):
                yield ",".join(f"{s}={n}" for s, n in smallest.items())


def all_pairs() -> Iterator[tuple[str, str, AvailableOption]]:
    for method in compositions():
        for group, keys in available_options(method).items():
            for key, option in keys.items():
                yield method, f"{group}.{key}", option


def distinct_pairs() -> list[tuple[str, str, AvailableOption]]:
    """One method for every option. Options of one name that are declared in two places are two."""
    found = {}
    for method, path, option in sorted(all_pairs(), key=lambda pair: pair[0] == "shoal"):  # the slowest comes last
        found.setdefault((path, id(option.declaration)), (method, path, option))
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every option of every method")
    parser.add_argument("--only", nargs="*", default=[], help="only these methods or options")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for method, path, option in all_pairs() if asked.all else distinct_pairs():
        if asked.only and not {method, path} & set(asked.only):
            continue
        found = try_option(method, path, option)
        rows.append(vars(found))
        print(f"{found.outcome:9} {method:12} {path:28} {found.value!r:>12}  {found.detail}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row for row in rows if row["outcome"] == "NO EFFECT"]
    print(f"{len(rows)} options looked at, {len(wrong)} without effect")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
