"""The methods, one file each. `METHODS` is the list that `shoal methods` prints.

Methods are composed of the pieces in `pieces/`, by the functions in `composition/`, or build their stages themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shoal.errors import UserError, import_callable, look_up
from shoal.methods.apcsma import apcsma
from shoal.methods.centralised import centralised
from shoal.methods.clsm_fl import clsm_fl
from shoal.methods.clustlowvar import clustlowvar
from shoal.methods.composition.compose import factory_from_pieces, parse_composition
from shoal.methods.composition.edges import with_edges
from shoal.methods.composition.setting import AvailableOption, Setting
from shoal.methods.delta import delta
from shoal.methods.ditto import ditto
from shoal.methods.fce import fce
from shoal.methods.fedala import fedala
from shoal.methods.fedavg import fedavg
from shoal.methods.fedavg_ft import fedavg_ft
from shoal.methods.fedcor import fedcor
from shoal.methods.fedcos import fedcos
from shoal.methods.fedepc import fedepc
from shoal.methods.fedgroup import fedgroup
from shoal.methods.fedper import fedper
from shoal.methods.fedphp import fedphp
from shoal.methods.fedprox import fedprox
from shoal.methods.fedrep import fedrep
from shoal.methods.flacc import flacc
from shoal.methods.flis import flis
from shoal.methods.haccs import haccs
from shoal.methods.hierfavg import hierfavg
from shoal.methods.ifca import ifca
from shoal.methods.local import local
from shoal.methods.pfmoe import pfmoe
from shoal.methods.pm_moe import pm_moe
from shoal.methods.powerd import powerd
from shoal.methods.repclust import repclust
from shoal.methods.scmoe import scmoe
from shoal.methods.shoal import shoal
from shoal.methods.simclust import simclust
from shoal.models import load_model
from shoal.stages.edges import Topology
from shoal.types import Method, Schedule

METHODS: dict[str, Callable[[Setting], Method]] = {
    "shoal": shoal,
    "fedavg": fedavg,
    "hierfavg": hierfavg,
    "fedprox": fedprox,
    "fedcos": fedcos,
    "fedavg-ft": fedavg_ft,
    "ditto": ditto,
    "fedala": fedala,
    "fedphp": fedphp,
    "apcsma": apcsma,
    "fedper": fedper,
    "fedrep": fedrep,
    "simclust": simclust,
    "repclust": repclust,
    "powerd": powerd,
    "fedcor": fedcor,
    "delta": delta,
    "clustlowvar": clustlowvar,
    "flis": flis,
    "haccs": haccs,
    "clsm-fl": clsm_fl,
    "fedgroup": fedgroup,
    "flacc": flacc,
    "fedepc": fedepc,
    "scmoe": scmoe,
    "pm-moe": pm_moe,
    "pfmoe": pfmoe,
    "ifca": ifca,
    "fce": fce,
    "local": local,
    "centralised": centralised,
}


def method_factory(name: str) -> Callable[[Setting], Method]:
    """Returns the function that builds a method.

    Parameters
    ----------
    name : str
        The name of a method, its pieces (`cluster=aidc,train=proximal`), or `package.module:function` for a user's own
        function from Setting to Method.

    Raises
    ------
    UserError
        If there is no such method.
    """
    if "=" in name:
        return factory_from_pieces(name)
    if ":" in name:
        return import_callable("method", name)
    return look_up("method", name, METHODS, own_format="package.module:function, or pieces such as select=balanced")


def is_method(name: str) -> bool:
    """Returns whether this names a method, and not a run or a file."""
    return name in METHODS or ":" in name or "=" in name


def build(name: str | Callable[[Setting], Method], setting: Setting) -> Method:
    """Builds a method from a setting.

    Parameters
    ----------
    name : str or callable
        A name as for `method_factory`, or a function from Setting to Method.
    setting : Setting
        The model, the numbers of the job and the user's options.

    Returns
    -------
    Method

    Raises
    ------
    UserError
        If an option is unknown, has an invalid value, or has no effect in this method.
    """
    factory = method_factory(name) if isinstance(name, str) else name
    method = replace(factory(setting), cohort_size=setting.cohort_size)
    for stage in method.stages:
        if not isinstance(getattr(stage, "schedule", None), Schedule):
            raise UserError(
                f"stage {stage.name!r} of method {method.name} has no schedule; its class must be a subclass of "
                "shoal.stages.base.Scheduled, or have the attribute schedule, a shoal.types.Schedule"
            )
    if setting.edges is not None:
        method = with_edges(method, setting, setting.edges)
    setting.refuse_unknown_options(method.name, factory)
    return method


def summary(name: str) -> str:
    """Returns the first paragraph of a method's module docstring, or the pieces of a composition."""
    if "=" in name:
        chosen = ", ".join(f"{step}={piece}" for step, piece in parse_composition(name).items())
        return f"Composed of {chosen}; the other steps are those of FedAvg."
    doc = sys.modules[method_factory(name).__module__].__doc__ or ""
    return doc.strip().split("\n\n")[0].replace("\n", " ")


def dry_build(
    name: str, options: Mapping[str, Mapping[str, Any]], cohort_size: int = 1, edges: Topology | None = None
) -> Setting:
    """Builds the method on a small network, which checks its name and its options without any data."""
    setting = Setting(load_model("mlp", (1,), 2), rounds=20, cohort_size=cohort_size, options=options, edges=edges)
    build(name, setting)
    return setting


def available_options(name: str) -> dict[str, dict[str, AvailableOption]]:
    """Returns the options of a method by group and key, with default, meaning and accepted values."""
    return dry_build(name, {}).available_options


def default_options(name: str) -> dict[str, dict[str, Any]]:
    """Returns the default values of the options of a method by group and key."""
    return {group: {k: o.default for k, o in keys.items()} for group, keys in available_options(name).items()}


__all__ = [
    "METHODS",
    "AvailableOption",
    "Setting",
    "available_options",
    "build",
    "default_options",
    "dry_build",
    "is_method",
    "method_factory",
    "summary",
]
