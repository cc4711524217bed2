"""The method and the model of a run, rebuilt from its run directory without any data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shoal.errors import UserError
from shoal.experiment.job import Job, make_job
from shoal.methods import build
from shoal.methods.composition.setting import build_setting
from shoal.models import Model, load_model
from shoal.serve.inputs import Inputs
from shoal.store.reader import read_run
from shoal.types import ClientId, Method

# The job keys that method and model are built from. None of them reveals where the data are.
JOB_KEYS = (
    "method",
    "model",
    "rounds",
    "cohort",
    "epochs",
    "batch_size",
    "lr",
    "momentum",
    "eval_every",
    "set",
    "edges",
)


@dataclass(frozen=True)
class Blueprint:
    """The job keys and the inputs from which the method and the model of a run are built."""

    job: Job
    inputs: Inputs

    @classmethod
    def from_run(cls, path: Path) -> Blueprint:
        """Returns the blueprint of a run directory. Raises `UserError` if it has no inputs.json."""
        run = read_run(path)
        inputs_file = path / "inputs.json"
        if not inputs_file.exists():
            raise UserError(
                f"{path} has no inputs.json, which says how inputs are prepared. It was started by an older version of "
                "shoal. Start a new run."
            )
        job = {k: run.config[k] for k in JOB_KEYS if k in run.config}
        if run.config.get("edge_column") is not None:
            job["edges"] = "column"  # the name of the column is of no use without the data
        return cls.from_facts({"job": job, "inputs": json.loads(inputs_file.read_text())}, str(inputs_file))

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], source: str) -> Blueprint:
        """Returns the blueprint from metadata. `source` names the file in errors."""
        try:
            inputs = TypeAdapter(Inputs).validate_python(facts["inputs"])
        except (ValidationError, KeyError) as error:
            raise UserError(f"{source} has no valid description of the inputs: {str(error).splitlines()[0]}") from None
        return cls(make_job(facts["job"]), inputs)

    def facts(self) -> dict[str, Any]:
        """Returns the metadata from which `from_facts` builds the same blueprint."""
        job = json.loads(self.job.model_dump_json(include=set(JOB_KEYS)))
        return {"job": job, "inputs": asdict(self.inputs)}

    @property
    def user_code(self) -> str | None:
        """The class or function of a user that must be imported, or None."""
        return next((name for name in (self.job.model, self.job.method) if ":" in name), None)

    @cached_property
    def model(self) -> Model:
        """The network."""
        return load_model(self.job.model, self.inputs.shape, len(self.inputs.classes))

    @cached_property
    def method(self) -> Method:
        """The method."""
        return build(self.job.method, build_setting(self.job, self.model, int(self.job.cohort)))


def read_clients(path: Path) -> tuple[frozenset[ClientId], frozenset[ClientId]]:
    """Returns the clients of a run and its unseen clients."""
    partition = read_run(path).partition
    return frozenset(partition["clients"]), frozenset(partition.get("unseen", ()))
