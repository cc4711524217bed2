"""Assembles an experiment: loads and divides the data of a job, and builds its model, method, costs and fleet.

Read run.py next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.cost.carbon import Carbon
from shoal.cost.costs import CostModel
from shoal.cost.devices import assign_profiles
from shoal.cost.links import find_link
from shoal.data import check_partition, check_source, load, partition
from shoal.data.federation import DEFAULT_SENSITIVE_FRACTION, Federation
from shoal.data.heterogeneity import heterogeneity_metrics
from shoal.errors import UserError
from shoal.experiment.job import Job
from shoal.fleet.allocator import keep_freed_memory
from shoal.fleet.plain import PlainFleet
from shoal.fleet.pool import PoolFleet, count_cores
from shoal.fleet.vector import VectorFleet
from shoal.methods import Setting, build, dry_build
from shoal.methods.composition.setting import build_setting, build_topology
from shoal.models import Model, load_model, network_factory
from shoal.models.model import is_stackable
from shoal.stages.edges import Topology
from shoal.store.run_directory import RunStore
from shoal.types import ClientId, Fleet, Method, Tree

log = logging.getLogger(__name__)

DEFAULT_CLOUD_LINK = "ethernet"
DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Experiment:
    """A job with its data, model, method and costs, ready to run."""

    job: Job  # with every open choice made
    federation: Federation
    model: Model
    method: Method
    costs: CostModel

    @property
    def cohort(self) -> int | float | None:
        """Clients per round, or None if the method decides by something else, such as time."""
        return self.job.cohort if self.method.uses_cohort_size else None


def validate_job(job: Job, out: Path | None = None) -> None:
    """Refuses what can be seen to be wrong before any data are loaded."""
    _refuse_cloud_without_edges(job, dry_build(job.method, job.set, _min_cohort_size(job), build_topology(job)).edges)
    check_source(job.data)
    check_partition(job.partition)
    network_factory(job.model)
    build_costs(job, ())
    if job.measure == "codecarbon":
        Carbon(job.country)
    elif job.country is not None:
        raise UserError(f"country is {job.country!r}, but no energy is measured. Add --measure codecarbon.")
    _checked_device(job.device)
    if job.clients is not None:
        job.cohort_size(job.num_training_clients(job.clients))
    if job.fleet == "flower":
        _import_flower_fleet()
    if out is not None:
        RunStore.check_free(out)


def _refuse_cloud_without_edges(job: Job, edges: Topology | None) -> None:
    for key in ("cloud_every_rounds", "cloud_link"):
        if edges is None and getattr(job, key) is not None:
            raise UserError(
                f"{key} is {getattr(job, key)!r}, but there are no edge servers. Add --edges or --edge-column."
            )


def _min_cohort_size(job: Job) -> int:
    """Returns the clients per round, as far as they are known before the data are loaded."""
    if job.clients is not None:
        return job.cohort_size(job.num_training_clients(job.clients))
    return job.cohort if isinstance(job.cohort, int) and job.cohort > 0 else 1


def load_federation(job: Job, progress: Any = None) -> Federation:
    """Loads the data of a job and divides them among the clients."""
    clients = job.clients if job.clients is not None or job.has_natural_partition else 20
    dataset = load(
        job.data,
        seed=job.seed,
        clients=clients,
        label_column=job.label_column,
        client_column=job.client_column,
        sensitive_column=job.sensitive_column,
        edge_column=job.edge_column,
        drop_columns=job.drop_columns,
        max_train_samples=job.max_train_samples,
        unseen=(job.unseen or 0) if job.has_natural_partition else 0,
        min_samples=job.min_samples,
        progress=progress,
    )
    num_public = (
        dry_build(job.method, job.set, _min_cohort_size(job)).num_public_requested
        if job.public_samples is None
        else job.public_samples
    )
    return partition(
        dataset,
        job.partition,
        clients=clients,
        seed=job.seed,
        min_samples=job.min_samples,
        val_fraction=job.val_fraction,
        test_fraction=job.test_fraction,
        sensitive_fraction=DEFAULT_SENSITIVE_FRACTION if job.sensitive_fraction is None else job.sensitive_fraction,
        public_samples=num_public,
        unseen=job.unseen or 0,
        device=_checked_device(job.device),
    )


def _checked_device(name: str) -> torch.device:
    kind = name.split(":")[0]
    if kind not in DEVICES:
        raise UserError(f"device is {name!r}; it must be one of {', '.join(DEVICES)}, such as cuda:0")
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device(name)


def assemble_job(job: Job, progress: Any = None) -> Experiment:
    """Loads the data of a job and builds the rest of its experiment."""
    return assemble(job, job.method, load_federation(job, progress))


def assemble(job: Job, method: str | Callable[[Setting], Method], federation: Federation) -> Experiment:
    """Builds the model and the method for a federation, and makes the open choices of the job."""
    model = load_model(job.model, federation.input_shape, len(federation.classes), job.device)
    cohort = job.cohort_size(len(federation))
    setting = build_setting(job, model, cohort, federation.public_samples, federation.edge_of_client)
    setting.planted_groups = federation.planted_groups
    built = build(method, setting)
    _refuse_cloud_without_edges(job, setting.edges)
    _refuse_impossible_edges(setting.edges, federation)
    _refuse_without_validation(built, setting, federation)
    fleet = choose_fleet(job.fleet, model, count_cores())
    decided = {
        "clients": len(federation) + len(federation.unseen),
        "unseen": len(federation.unseen) or None,
        "cohort": cohort,
        "fleet": fleet,
        "pieces": job.pieces or (count_cores() if fleet == "pool" else None),
        "public_samples": num_public_samples(federation) or job.public_samples,
    }
    if setting.edges is not None:
        decided |= {
            "cloud_every_rounds": setting.edges.cloud_every_rounds,
            "cloud_link": job.cloud_link or DEFAULT_CLOUD_LINK,
        }
        by_column = setting.edges.assignment == "column"
        decided["edges"] = job.edges if by_column else f"{setting.edges.assignment}:{setting.edges.num_edges}"
    job = job.model_copy(update=decided)
    costs = build_costs(job, federation)
    _warn_about_small_devices(costs, model)
    return Experiment(job, federation, model, built, costs)


def _refuse_impossible_edges(edges: Topology | None, federation: Federation) -> None:
    if edges is None:
        return
    if edges.assignment == "column" and not federation.edge_of_client:
        raise UserError(
            "edges is 'column', but the data do not name the edge server of each client. Add --edge-column."
        )
    if edges.num_edges > len(federation):
        raise UserError(
            f"edges is {edges.num_edges}, but there are only {len(federation)} clients. Use fewer edge servers."
        )


def _refuse_without_validation(method: Method, setting: Setting, federation: Federation) -> None:
    used_splits = {phase.split for program in method.programs.values() for phase in program.phases}
    if any(split.startswith("val") for split in used_splits) and not int(federation.samples_per_client("val").sum()):
        hint = "".join(
            f", or --set {group}.{key}={option.declaration.value_without_validation}"
            for group, keys in setting.available_options.items()
            for key, option in keys.items()
            if option.declaration.value_without_validation is not None
        )
        raise UserError(
            f"method {method.name} needs validation samples, but val_fraction is 0. Set --val-fraction above 0{hint}."
        )


def build_costs(job: Job, clients: Iterable[ClientId]) -> CostModel:
    """Returns the cost model of a job for these clients."""
    return CostModel(
        profiles=assign_profiles(job.devices, list(clients), job.seed),
        link=find_link(job.link, job.radio_w),
        cloud_link=None if job.cloud_link is None else find_link(job.cloud_link),
        count_idle=job.count_idle,
        battery_joules=job.battery_joules,
        budget_joules=job.budget_joules,
        deadline_s=job.deadline_s,
    )


def _warn_about_small_devices(costs: CostModel, model: Model) -> None:
    """Warns about devices that have too little memory for the weights, their gradients and the received model."""
    min_bytes = 3 * 4 * model.num_parameters
    for profile in sorted({p.name: p for p in costs.profiles.values()}.values(), key=lambda p: p.memory_bytes):
        if profile.memory_bytes < min_bytes:
            log.warning(
                "Device %r has %s bytes of memory, but training this model needs at least %s. The run simulates it "
                "nevertheless.",
                *(profile.name, f"{profile.memory_bytes:,}", f"{min_bytes:,}"),
            )


def choose_fleet(requested: str, model: Model, num_cores: int) -> str:
    """Returns the name of the fleet.

    The rule uses no measurement, because the same job must give the same bytes on a busy machine and on an idle one. It
    does not use the number of workers either, which must not change a byte.
    """
    on_cpu = torch.device(model.device).type == "cpu"
    if requested == "pool" and not on_cpu:
        raise UserError(
            f"fleet 'pool' needs --device cpu, not {model.device!r}, because forked processes cannot share a GPU"
        )
    if requested != "auto":
        return requested
    if num_cores > 1 and on_cpu:
        return "pool"
    return "vector" if is_stackable(model) else "plain"


def make_fleet(experiment: Experiment, private_states: MutableMapping[ClientId, Tree] | None = None) -> Fleet:
    """Returns the fleet that executes the clients of an experiment."""
    method, federation = experiment.method, experiment.federation
    keep_freed_memory()
    match experiment.job.fleet:
        case "plain":
            return PlainFleet(federation, private_states)
        case "vector":
            return VectorFleet(federation, private_states, pieces=experiment.job.pieces)
        case "pool":
            worker_fleet = VectorFleet if is_stackable(experiment.model) else PlainFleet
            return PoolFleet(
                method, federation, private_states, worker_fleet, experiment.job.workers, experiment.job.pieces
            )
        case "flower":
            fleet: Fleet = _import_flower_fleet()(method, federation, private_states)
            return fleet
        case unknown:
            raise UserError(f"fleet {unknown!r} is not known; choose auto, plain, vector, pool or flower")


def _import_flower_fleet() -> Callable[..., Fleet]:
    try:
        from shoal.deploy.loopback import loopback_fleet
    except ImportError as error:
        raise UserError(
            f"fleet 'flower' needs the extra named flower: pip install -c constraints.txt -e '.[flower]' ({error})"
        ) from None
    return loopback_fleet


@contextmanager
def fleet_session(experiment: Experiment, fleet: Fleet) -> Iterator[None]:
    """Sets the number of threads while `fleet` is used, and stops its workers afterwards.

    With a pool the server uses one thread: it has little work, and the cores belong to the workers. Work that is
    divided into pieces runs on one thread on every fleet, because the number of threads changes the last bits.
    """
    num_threads = torch.get_num_threads()
    if isinstance(fleet, PoolFleet) or experiment.job.pieces is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        if isinstance(fleet, PoolFleet):
            fleet.close()


def num_public_samples(federation: Federation) -> int:
    """Returns the number of samples that are set aside for the server."""
    return 0 if federation.public_samples is None else len(federation.public_samples.y)


def input_facts(federation: Federation) -> dict[str, Any]:
    """Returns the content of inputs.json, with which a model can be served without the data."""
    return {
        "shape": list(federation.input_shape),
        "classes": list(federation.classes),
        "preparation": None if federation.preparation is None else asdict(federation.preparation),
    }


def partition_facts(federation: Federation) -> dict[str, Any]:
    """Returns the content of partition.json: how the samples are divided among the clients."""
    counts = federation.label_counts()
    return {
        "clients": list(federation),
        "classes": list(federation.classes),
        "counts": counts.tolist(),
        "sizes": {split: federation.samples_per_client(split).tolist() for split in ("train", "val", "test")},
        "heterogeneity": {k: int(v) if float(v).is_integer() else v for k, v in heterogeneity_metrics(counts).items()},
        "shifts": federation.shifts,
        "planted_groups": federation.planted_groups,
        "partition": federation.partition,
        "note": federation.note,
        "num_public_samples": num_public_samples(federation),
        **({} if federation.edge_of_client is None else {"edges": federation.edge_of_client}),
        **({"unseen": list(federation.unseen)} if federation.unseen else {}),
    }
