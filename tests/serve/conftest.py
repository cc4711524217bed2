"""Fixtures of real runs, and of real servers on loopback."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import torch
from services import running_server
from sklearn.datasets import load_digits

from shoal.experiment.job import Job
from shoal.experiment.run import run_job
from shoal.serve.export import load_newest

SMALL = {"clients": 10, "cohort": 5, "rounds": 2, "epochs": 1, "fleet": "vector"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Returns the run of a method, which is made at the first call."""
    folder, run_dirs = tmp_path_factory.mktemp("runs"), {}

    def run(method, **job):
        name = "-".join([method.replace(":", "-"), *(f"{k}{v}" for k, v in job.items())]).replace("/", "_")
        if name not in run_dirs:
            run_dirs[name] = folder / name
            run_job(Job(**SMALL | {"method": method} | job), run_dirs[name])
        return run_dirs[name]

    return run


@pytest.fixture(scope="session")
def clustered(runs):
    """A service of a method with clusters, where each caller is served one expert."""
    with running_server(runs("ifca")) as running:
        yield running


@pytest.fixture(scope="session")
def routed(runs):
    """A service of a method that chooses a model for each sample."""
    with running_server(runs("ensembles:ensemble")) as running:
        yield running


@pytest.fixture(scope="session")
def http():
    with httpx.Client(timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def images():
    """Raw digits: [samples, 8, 8], from 0 to 16."""
    return load_digits().images[:12]


@pytest.fixture(scope="session")
def expected():
    """Returns the probabilities that the method itself computes from raw digits."""

    def probabilities(run, images, client=None):
        version = load_newest(run)
        x = version.blueprint.inputs.preparation(np.asarray(images, dtype=np.float32)[:, None])
        with torch.no_grad():
            models = version.method.models_for(version.state, client)
            return version.method.predict(models, {}, x).softmax(-1)

    return probabilities
