"""Federated learning for fleets of edge devices whose data differ.

fleet = shoal.partition(shoal.load("digits"), "dirichlet:0.3", clients=20, seed=0)
result = shoal.run("fedavg", fleet, rounds=20, cohort=5, seed=0)
result.accuracy["local"]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import Federation, load, partition
    from shoal.errors import UserError
    from shoal.experiment.run import run
    from shoal.methods import METHODS, Setting

__version__ = "0.1.0"
__all__ = ["METHODS", "Federation", "Setting", "UserError", "load", "partition", "run"]

_MODULE_OF_NAME = {
    "Federation": "shoal.data",
    "load": "shoal.data",
    "partition": "shoal.data",
    "UserError": "shoal.errors",
    "run": "shoal.experiment.run",
    "METHODS": "shoal.methods",
    "Setting": "shoal.methods",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `shoal --help` does not wait for torch."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)
