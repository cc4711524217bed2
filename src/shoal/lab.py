"""From a job to a run directory: data, partition, model, method and fleet put together, run, resumed."""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal import engine
from shoal.clusterers.repulsive import objectives
from shoal.cost.carbon import Carbon, split
from shoal.cost.devices import assign
from shoal.cost.ledger import PARTS, Ledger, totals
from shoal.cost.links import link
from shoal.cost.model import Costs
from shoal.cost.timer import Timer
from shoal.data import load, partition
from shoal.data.federation import SENSITIVE, Federation
from shoal.data.heterogeneity import figures
from shoal.engine import Clock, Record, Result
from shoal.errors import UserError
from shoal.fleet.memory import keep_freed_memory
from shoal.fleet.plain import PlainFleet
from shoal.fleet.pool import PoolFleet, cores
from shoal.fleet.vector import VectorFleet
from shoal.job import Job, make_job
from shoal.methods import Setting, build, rehearsed
from shoal.models import Model, check_model, load_model
from shoal.rng import derive_seed
from shoal.stages.cluster import GROUPS, Group, Repulsive
from shoal.stages.experts import Experts
from shoal.store.run import RunStore
from shoal.table import Table
from shoal.types import ClientId, Fleet, Guaranteed, Method, ServerState, Tree

log = logging.getLogger(__name__)

OF_DATA = (
    *("data", "partition", "clients", "rows", "min_size", "val_share", "test_share"),
    *("label_column", "client_column", "sensitive", "sensitive_column", "drop_columns", "public"),
)
DEVICES = ("cpu", "cuda", "mps", "xpu")
REPRESENTATIONS = {"labels": "label distributions", "sparsity": "sparsity vectors"}  # by the column that holds them
SAYS_NOTHING = 100  # an ε that large, at any δ
WITHOUT_LIBRARIES = (
    "again",
    "heads",
    "personalise",
    "represent",
    "select",
    "train",
)  # stages that need nothing slow to load
ANSWERING, BATCH_ROWS, TURNS = 5, 32, 9  # clients, rows and repetitions by which predictions are timed
OnRound = Callable[[Record], None]


@dataclass(frozen=True)
class Bench:
    """What a job stands for, ready to run."""

    job: Job  # with nothing left to be decided
    federation: Federation
    model: Model
    method: Method
    costs: Costs

    @property
    def cohort(self) -> int | float | None:
        """Clients per round; None where the method chooses by something else, such as time."""
        sized = all(hasattr(stage, "size") for stage in self.method.stages if stage.name == "select")
        return self.job.cohort if sized else None


def check_names(job: Job, out: Path | None = None) -> None:
    """What can be refused before any data are loaded."""
    rehearsed(job.method, job.set, _least_cohort(job))
    check_model(job.model)
    costs_of(job, ())
    if job.measure == "codecarbon":
        Carbon(job.country)
    elif job.country is not None:
        raise UserError(f"country is {job.country!r}, but nothing is measured: add --measure codecarbon")
    _device(job.device)
    if job.clients is not None:
        job.cohort_size(job.clients)
    if job.fleet == "flower":
        _flower()
    if out is not None:
        RunStore.check_free(out)


def _least_cohort(job: Job) -> int:
    """Clients per round, as far as it can be said before the data are there."""
    if job.clients is not None:
        return job.cohort_size(job.clients)
    return job.cohort if isinstance(job.cohort, int) and job.cohort > 0 else 1


def federation_of(job: Job, progress: Any = None) -> Federation:
    clients = job.clients if job.clients is not None or job.natural else 20
    dataset = load(
        job.data,
        seed=job.seed,
        clients=clients,
        label_column=job.label_column,
        client_column=job.client_column,
        sensitive_column=job.sensitive_column,
        drop_columns=job.drop_columns,
        rows=job.rows,
        progress=progress,
    )
    wanted = rehearsed(job.method, job.set, _least_cohort(job)).public_wanted if job.public is None else job.public
    return partition(
        dataset,
        job.partition,
        clients=clients,
        seed=job.seed,
        min_size=job.min_size,
        val_share=job.val_share,
        test_share=job.test_share,
        sensitive=SENSITIVE if job.sensitive is None else job.sensitive,
        public=wanted,
        device=_device(job.device),
    )


def _device(name: str) -> torch.device:
    kind = name.split(":")[0]
    if kind not in DEVICES:
        raise UserError(f"device is {name!r}; it must be one of {', '.join(DEVICES)}, such as cuda:0")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device(name)


def setup(job: Job, progress: Any = None) -> Bench:
    return arrange(job, job.method, federation_of(job, progress))


def arrange(job: Job, method: str | Callable[[Setting], Method], federation: Federation) -> Bench:
    """The model and the method for this federation, and the job with its open choices made."""
    model = load_model(job.model, federation.input_shape, len(federation.classes), job.device)
    cohort = job.cohort_size(len(federation))
    setting = Setting(
        model=model,
        rounds=job.rounds,
        cohort=cohort,
        epochs=job.epochs,
        batch_size=job.batch_size,
        lr=job.lr,
        momentum=job.momentum,
        eval_every=job.eval_every,
        options=job.set,
        public=federation.public,
    )
    built = build(method, setting)
    _refuse_without_validation(built, federation)
    workers = job.workers or cores()
    decided = {
        "clients": len(federation),
        "cohort": cohort,
        "workers": workers,
        "fleet": choose_fleet(job.fleet, model, workers),
        "public": _public_rows(federation) or job.public,
    }
    costs = costs_of(job, federation)
    _warn_of_small_devices(costs, model)
    return Bench(job.model_copy(update=decided), federation, model, built, costs)


def _refuse_without_validation(method: Method, federation: Federation) -> None:
    used = {phase.split for program in method.programs.values() for phase in program.phases}
    if any(split.startswith("val") for split in used) and not int(federation.sizes("val").sum()):
        hint = ", or --set train.judge=train" if "val/low" in used else ""
        raise UserError(f"method {method.name} needs validation rows, but val_share is 0; it must be above 0{hint}")


def costs_of(job: Job, clients: Iterable[ClientId]) -> Costs:
    return Costs(
        profiles=assign(job.devices, list(clients), job.seed),
        link=link(job.link, job.radio_w),
        count_idle=job.count_idle,
        battery_joules=job.battery,
        budget_joules=job.budget_joules,
        deadline_s=job.deadline_s,
    )


def _warn_of_small_devices(costs: Costs, model: Model) -> None:
    """Training holds at least the weights, their gradients and what was received."""
    least_bytes = 3 * 4 * model.parameters
    for profile in sorted({p.name: p for p in costs.profiles.values()}.values(), key=lambda p: p.memory_bytes):
        if profile.memory_bytes < least_bytes:
            log.warning(
                "device %r has %s bytes of memory, but training this model needs at least %s: it is simulated all the "
                "same",
                *(profile.name, f"{profile.memory_bytes:,}", f"{least_bytes:,}"),
            )


def run(
    method: str | Callable[[Setting], Method],
    federation: Federation,
    *,
    on_round: OnRound | None = None,
    **keys: Any,
) -> Result:
    """A run in memory: `keys` are those of a job (rounds, cohort, epochs, lr, model, seed, set, ...)."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "own")
    for key in (*OF_DATA, "keep", "device"):
        if key in keys:
            raise UserError(f"{key} is {keys[key]!r}, but shoal.run is given a federation; say it to shoal.partition")
    for key in ("measure", "country"):
        if key in keys:
            raise UserError(f"{key} is {keys[key]!r}, but only runs that are kept are measured: use the command line")
    bench = arrange(make_job({"method": name} | keys), method, federation)
    fleet = make_fleet(bench)
    with at_work(fleet):
        return engine.run(
            bench.method,
            fleet,
            rounds=bench.job.rounds,
            seed=bench.job.seed,
            central=federation.central,
            eval_every=bench.job.eval_every,
            ledger=Ledger(bench.costs),
            on_round=on_round,
        )


def choose_fleet(asked: str, model: Model, workers: int) -> str:
    """A rule, not a measurement: the same job must give the same bytes on a busy machine and on a quiet one."""
    on_cpu = torch.device(model.device).type == "cpu"
    if asked == "pool" and not on_cpu:
        raise UserError(f"fleet 'pool' needs --device cpu, not {model.device!r}: a GPU cannot be shared by forking")
    if asked != "auto":
        return asked
    if workers > 1 and on_cpu:
        return "pool"
    return "vector" if stacks_well(model) else "plain"


def stacks_well(model: Model) -> bool:
    """Dense layers gain from stacked clients; stacked convolutions become grouped ones, slow on a CPU."""
    return model.batchable and not model.uses(nn.modules.conv._ConvNd)


def make_fleet(bench: Bench, private: MutableMapping[ClientId, Tree] | None = None) -> Fleet:
    method, federation = bench.method, bench.federation
    keep_freed_memory()
    match bench.job.fleet:
        case "plain":
            return PlainFleet(federation, private)
        case "vector":
            return VectorFleet(federation, private)
        case "pool":
            inside = VectorFleet if stacks_well(bench.model) else PlainFleet
            return PoolFleet(method, federation, private, inside, bench.job.workers)
        case "flower":
            fleet: Fleet = _flower()(method, federation, private)
            return fleet
        case unknown:
            raise UserError(f"fleet {unknown!r} is not known; choose auto, plain, vector, pool or flower")


def _flower() -> Callable[..., Fleet]:
    try:
        from shoal.fleet.flower import loop_fleet
    except ImportError as error:
        raise UserError(
            f"fleet 'flower' needs the extra of that name: pip install -c constraints.txt -e '.[flower]' ({error})"
        ) from None
    return loop_fleet


@contextmanager
def at_work(fleet: Fleet) -> Iterator[None]:
    """Beside a pool the server needs one thread: what it does is small, and the cores belong to the workers, who
    go when the work is done."""
    before = torch.get_num_threads()
    if isinstance(fleet, PoolFleet):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if isinstance(fleet, PoolFleet):
            fleet.close()


def _public_rows(federation: Federation) -> int:
    return 0 if federation.public is None else len(federation.public.y)


def describe(federation: Federation) -> dict[str, Any]:
    """partition.json: who holds what."""
    counts = federation.counts()
    return {
        "clients": list(federation),
        "classes": list(federation.classes),
        "counts": counts.tolist(),
        "sizes": {split: federation.sizes(split).tolist() for split in ("train", "val", "test")},
        "figures": {k: int(v) if float(v).is_integer() else v for k, v in figures(counts).items()},
        "shifts": federation.shifts,
        "groups": federation.groups,
        "spec": federation.spec,
        "note": federation.note,
        "public": _public_rows(federation),
    }


def start(job: Job, out: Path, on_setup: Callable[[Bench], None] | None = None, **kw: Any) -> dict[str, Any]:
    """A new run in `out`. Returns what `--json` prints."""
    check_names(job, out)
    bench = setup(job, kw.pop("progress", None))
    bench.method.init(job.seed)  # what the model cannot do is refused before anything is announced
    if on_setup:
        on_setup(bench)
    return play(bench, out, **kw)


def play(bench: Bench, out: Path, **kw: Any) -> dict[str, Any]:
    config = json.loads(bench.job.model_dump_json())
    facts = describe(bench.federation), bench.costs.facts()
    with RunStore.create(out, config, *facts, keep=bench.job.keep) as store:
        try:
            return _play(bench, store, **kw)
        except UserError:  # what only the first round could find out: a layer that is not there, a file
            store.discard_unbegun()
            raise


def resume(path: Path, on_setup: Callable[[Bench], None] | None = None, **kw: Any) -> dict[str, Any]:
    """Go on from the last complete round; the end is the same bytes as without the stop."""
    with RunStore.open(path) as store:
        bench = setup(make_job(store.config), kw.pop("progress", None))
        before = {"public": 0} | json.loads((path / "partition.json").read_text())  # older runs do not say it
        if describe(bench.federation) != before:
            raise UserError(f"{path} was run on other data: {bench.job.data!r} no longer gives the same partition")
        check_devices(path, bench.job)
        store.checkpoints.keep = bench.job.keep
        if on_setup:
            on_setup(bench)
        return _play(bench, store, **kw)


def profile(job: Job, **kw: Any) -> list[dict[str, Any]]:
    """Where a job's time goes, by share: a real run, in a folder that is thrown away."""
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        result = start(job, Path(folder) / "run", timer=timer, **kw)
    spent = dict(timer.seconds)
    spent["other"] = max(0.0, result["wall_s"] - sum(spent.values()))
    return [
        {"part": name, "seconds": round(s, 4), "per_round_s": s / job.rounds, "share": s / result["wall_s"]}
        for name, s in sorted(spent.items(), key=lambda item: -item[1])
    ]


def check_same(path: Path, job: Job) -> None:
    """A recipe goes on with a run only if it is the run it asks for."""
    found = make_job(json.loads((path / "config.json").read_text()))
    asked = job.model_dump() | {"cohort": job.cohort_size(found.clients or 1)}
    undecided = {"clients": None, "workers": None, "fleet": "auto", "public": None}
    open_choices = {k for k, v in undecided.items() if asked[k] == v}
    for key, value in asked.items():
        if key not in open_choices and getattr(found, key) != value:
            raise UserError(f"{path} was run with {key} {getattr(found, key)!r}, not {value!r}; choose another --out")
    check_devices(path, found)


def check_devices(path: Path, job: Job) -> None:
    """The joules of one run follow from one set of figures. Runs of older versions did not keep theirs."""
    kept = path / "devices.json"
    if not kept.exists():
        return
    before = json.loads(kept.read_text())
    now = costs_of(job, before["clients"]).facts()
    if now != before:
        other = [name for name, figures in before["devices"].items() if figures != now["devices"].get(name)]
        raise UserError(
            f"{path} was run with other figures of {', '.join(other) or 'the link or the server'} than these have now, "
            "and joules would be mixed: restore them, or start a new run"
        )


def _play(bench: Bench, store: RunStore, on_round: OnRound | None = None, timer: Timer | None = None) -> dict[str, Any]:
    before, promise = store.restore(torch.device(bench.job.device)), promised(bench)
    _warn_of_little_noise(promise)
    fleet = make_fleet(bench, store.private)
    _import_before_the_clock(bench.method)
    timer = timer or Timer()
    with at_work(fleet), measuring(bench, timer) as measured:
        result = engine.run(
            bench.method,
            fleet,
            rounds=bench.job.rounds,
            seed=bench.job.seed,
            central=bench.federation.central,
            eval_every=bench.job.eval_every,
            state=before.state,
            records=before.records,
            ledger=Ledger(bench.costs, before.pages),
            store=store,
            on_round=on_round,
            timer=timer,
        )
    clock = Clock(before.clock.wall_s + result.wall_s, before.clock.server_s + result.server_s)
    if measured:
        measured["measured"]["rounds"] = len(result.records) - len(before.records)
    summary = summarise(bench, result, store.path, clock) | measured | protection(bench, result.state, promise)
    summary["predict_ms"] = predict_ms(bench, result.state, store.private)
    store.finish(summary)
    return summary


def _import_before_the_clock(method: Method) -> None:
    """Libraries that take a second to load, once in a process, are not the work of whichever round needs them first."""
    if any(type(stage).__module__.rpartition(".")[2] not in WITHOUT_LIBRARIES for stage in method.stages):
        for name in ("scipy.cluster.hierarchy", "scipy.linalg", "scipy.optimize", "sklearn.cluster", "sklearn.metrics"):
            importlib.import_module(name)


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


@contextmanager
def measuring(bench: Bench, timer: Timer) -> Iterator[dict[str, Any]]:
    """What CodeCarbon says this process used, if asked; known when the work is done."""
    found: dict[str, Any] = {}
    if bench.job.measure == "none":
        yield found
        return
    with Carbon(bench.job.country) as carbon:
        yield found
    measured = carbon.measured
    found["measured"] = {**asdict(measured), "parts_joules": split(measured, parts_of(bench.method, timer))}


def parts_of(method: Method, timer: Timer) -> dict[str, float]:
    """Seconds of a run by what they were for: of clients, what their stage is for."""
    stages = {f"{s.name}: clients": s.purpose for s in method.stages} | {
        f"{s.name}: server": "server" for s in method.stages
    }
    found = dict.fromkeys(("pre", "train", "server", "evaluate", "other"), 0.0)
    for name, seconds in timer.seconds.items():
        found[stages.get(name, "evaluate" if name.startswith("evaluate") else "other")] += seconds
    return found


def promised(bench: Bench) -> dict[str, Any]:
    """What noise protects, as the program that adds it says, and what it is on: what clients are grouped by. A method
    has one such program at most: guarantees are not added up."""
    sizes = bench.federation.sizes("train").tolist()
    found: dict[str, Any] = {}
    for program in bench.method.programs.values():
        if isinstance(program, Guaranteed):
            found |= program.guarantee(sizes)
    for stage in bench.method.stages if found else ():
        if isinstance(stage, Group | Experts):
            found["noise_on"] = REPRESENTATIONS.get(stage.column, stage.column)
    return found


def _warn_of_little_noise(promise: Mapping[str, Any]) -> None:
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
    for stage in (s for s in bench.method.stages if isinstance(s, Group) and s.column == "labels"):
        grouped = Table.load(state, stage.name)
        if len(grouped):
            found |= _blur(bench, stage, grouped)
    return {"privacy": found}


def _blur(bench: Bench, stage: Group, grouped: Table) -> dict[str, Any]:
    """Groups with noise beside those without. Mixed groups have no one right answer, so they are judged by what they
    are formed for (Eq. 3, on the true distributions), not by agreement."""
    from sklearn.metrics import adjusted_rand_score

    classes = len(bench.federation.classes)
    counts = [torch.bincount(bench.federation[c]["train"].y.cpu(), minlength=classes) for c in grouped.clients]
    true = np.stack([(n / n.sum().clamp(min=1)).double().numpy() for n in counts])
    seed = derive_seed(bench.job.seed, int(grouped["round"][0]), stage.name)
    with_noise, without = grouped["group"].numpy(), stage.rule(true, seed)
    if not isinstance(stage.rule, Repulsive):
        return {"ari": float(adjusted_rand_score(without, with_noise))}
    names = ("within", "between")
    noisy, clear = (dict(zip(names, objectives(true, labels), strict=True)) for labels in (with_noise, without))
    return {"objectives": noisy, "objectives_without_noise": clear}


def _by_group(result: Result) -> dict[str, Any]:
    """Joules of the groups that a method formed, if it did: to choose from, or to share a model in (the one they belong
    to most)."""
    grouped = Table.load(result.state, GROUPS)
    if "group" in grouped.columns:
        groups = dict(zip(grouped.clients, grouped["group"].tolist(), strict=True))
    else:
        groups = {c: int(weights.argmax()) for c, weights in result.state.membership.items()}
    if not groups:
        return {}
    spent = result.ledger.by_client()
    found: dict[str, dict[str, float]] = {}
    for client, group in sorted(groups.items()):  # one order of adding, whether resumed or not
        total = found.setdefault(str(group), {"clients": 0, **dict.fromkeys(PARTS, 0.0)})
        total["clients"] += 1
        for part, joules in spent.get(client, {}).items():
            total[part] += joules
    return {"joules_of_groups": dict(sorted(found.items(), key=lambda item: int(item[0])))}


def _groups(bench: Bench, result: Result) -> dict[str, Any]:
    """Who is in the group of which model, and how well that agrees with groups that were planted."""
    of = result.groups
    if not of:
        return {}
    members = [
        {"expert": name, "clients": [c for c in bench.federation if name in of.get(c, ())]}
        for name in sorted(result.state.models)
    ]
    planted = bench.federation.groups
    if planted is None:
        return {"groups": members}
    from sklearn.metrics import adjusted_rand_score

    nearest = {c: int(result.state.membership[c].argmax()) for c in of}
    agreement = adjusted_rand_score([planted[c] for c in nearest], list(nearest.values()))
    return {"groups": members, "groups_ari": float(agreement)}


def summarise(bench: Bench, result: Result, path: Path, clock: Clock) -> dict[str, Any]:
    job, server = bench.job, bench.costs.server
    joules = totals(result.ledger.pages)
    server_joules = clock.server_s * server.active_w
    return {
        "method": job.method,
        "seed": job.seed,
        "rounds": job.rounds,
        "data": job.data,
        "partition": job.partition,
        "clients": job.clients,
        "public": _public_rows(bench.federation),
        "cohort": bench.cohort,
        "model": job.model,
        "parameters": bench.model.parameters,
        "fleet": job.fleet,
        **result.evaluation.figures(),
        "train_loss": result.records[-1].metrics.get("train.loss"),
        "bytes_up": sum(r.bytes_up for r in result.records),
        "bytes_down": sum(r.bytes_down for r in result.records),
        "flops": sum(r.flops for r in result.records),
        "joules": joules | {"server": server_joules, "total": sum(joules.values()) + server_joules},
        "joules_of_clients": joules | {"kind": "modelled", "devices": job.devices, "link": job.link},
        "joules_of_server": {
            "total": server_joules,
            "seconds": clock.server_s,
            "watts": server.active_w,
            "kind": "measured seconds x assumed watts",
        },
        **({"notes": list(bench.method.notes)} if bench.method.notes else {}),
        **_groups(bench, result),
        **_by_group(result),
        "sim_time_s": sum(r.sim_time_s for r in result.records),
        "rounds_done": len(result.records),
        "stopped": result.stopped,
        "late": sum(r.late for r in result.records),
        "left": sum(len(r.left) for r in result.records),
        "wall_s": round(clock.wall_s, 3),
        "run_dir": str(path),
    }
