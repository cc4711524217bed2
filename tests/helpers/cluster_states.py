"""Models of two weights, and a server state that has one of them."""

import torch

from shoal.client.train import LocalTraining
from shoal.methods import Setting
from shoal.models import load_model
from shoal.types import Report, ServerState


def make_setting(**kw):
    return Setting(**{"model": load_model("mlp", (6,), 4), "rounds": 8, "cohort_size": 6, "batch_size": 8} | kw)


def make_model(*values):
    return {"w": torch.tensor(values), "seen": torch.tensor(3)}  # "seen" is a buffer: never trained


def training_reports(**models):
    return {c: Report({"model": make_model(*values)}, {}, {"train": 1}) for c, values in models.items()}


PROGRAM = LocalTraining(load_model("linear", (6,), 4), name="represent")


ORIGIN = ServerState(0, {"global": make_model(1.0, 1.0)}, roster=("a", "b", "c", "d", "e"))
