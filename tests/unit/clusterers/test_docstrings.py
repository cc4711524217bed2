"""Docstrings name every parameter and attribute of an estimator, and their examples are right."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
import re
from importlib import import_module

import numpy as np
import pytest

import shoal.clusterers

MODULES = [f"shoal.clusterers.{m.name}" for m in pkgutil.iter_modules(shoal.clusterers.__path__)]
ROWS = np.random.default_rng(0).dirichlet([1.0] * 4, 12)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_right(name):
    assert doctest.testmod(import_module(name)).failed == 0


def section(docstring, title):
    """Returns the names that a section of a numpydoc docstring describes."""
    _, _, rest = inspect.cleandoc(docstring).partition(f"\n{title}\n{'-' * len(title)}\n")
    body = re.split(r"\n\n\w+\n-+\n", rest)[0]
    return {name for line in re.findall(r"^(\w[\w, ]*) :", body, re.MULTILINE) for name in line.split(", ")}


@pytest.mark.parametrize("name", shoal.clusterers.__all__)
def test_every_parameter_and_attribute_is_described(name):
    estimator = getattr(shoal.clusterers, name)()
    assert section(estimator.__doc__, "Parameters") == set(estimator.get_params())
    rows = ROWS @ ROWS.T if name == "GreedyClusters" else ROWS
    attributes = {k for k in vars(estimator.fit(rows)) if k.endswith("_") and not k.startswith("_")}
    assert section(estimator.__doc__, "Attributes") == attributes
    assert "References\n" in estimator.__doc__


@pytest.mark.parametrize("name", MODULES)
def test_public_functions_describe_their_arguments_and_results(name):
    module = import_module(name)
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == name and not function.__name__.startswith("_"):
            assert section(function.__doc__, "Parameters") == set(inspect.signature(function).parameters)
            assert function.__annotations__["return"] == "None" or "Returns\n" in function.__doc__
