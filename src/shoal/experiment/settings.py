"""The settings that `shoal.run` takes, as types.

`make docs` writes this file from experiment/job.py.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class JobSettings(TypedDict, total=False):
    """Keyword arguments of `shoal.run`."""

    model: str
    """Train this network: mlp, mlp-dropout, linear, cnn-cifar, cnn-fedavg, cnn-1d, resnet18, resnet18-batchnorm, or
    your own as package.module:Class. Default: "mlp"."""

    variant: str | None
    """Show the run under this name in tables and reports. Default: the method's name."""

    set: dict[str, dict[str, Any]]
    """Change options of the method's pieces, such as train.mu=0.1. `shoal methods NAME` lists them. Default: no
    option."""

    rounds: int
    """Train for this many global rounds. It must be at least 1. Default: 20."""

    cohort: int | float
    """Select this many clients in each round. A whole number counts clients, so 1 is one client. A decimal number up to
    1.0 is a fraction of the clients that train, so 1.0 is all of them. Default: 0.25."""

    epochs: int
    """Let each selected client train for this many local epochs per round. It must be at least 1. Default: 2."""

    batch_size: int
    """Use this many samples in each step of local training. It must be at least 1. Default: 32."""

    lr: float
    """Use this learning rate in the clients' local SGD. It must be above 0. Default: 0.1."""

    momentum: float
    """Use this momentum in the clients' local SGD. The value 0 is plain SGD. It must be at least 0 and below 1.
    Default: 0.0."""

    seed: int
    """Derive every random choice of the data and of the run from this number. Default: 0."""

    eval_every: int
    """Evaluate once in this many rounds, and always after the last one. It must be at least 1. Default: 1."""

    devices: str
    """Model the clients' computation in seconds and joules as on this device: microcontroller, pi, phone, jetson,
    server, your own as file.toml#table, or a random mix such as pi:0.7,phone:0.3. Default: "pi"."""

    link: str
    """Model the clients' traffic in seconds and joules as on this link: wifi, wifi-slow, lte-m or ethernet. Default:
    "wifi"."""

    radio_w: float | None
    """Assume that the electronics of a client's radio draw this many watts during a transfer. It must be at least 0.
    Default: the value of the link."""

    count_idle: bool
    """Count also the joules that a client uses while it waits for slower clients. Default: false."""

    battery_joules: float | None
    """Give each client a battery of this many joules. A client with an empty battery drops out of the run. It must be
    above 0. Default: no limit."""

    budget_joules: float | None
    """End the run after the round in which all clients together have used this many joules. What the server uses does
    not count. It must be above 0. Default: no limit."""

    deadline_s: float | None
    """Drop a client's report that takes longer than this many simulated seconds in its stage. It must be above 0.
    Default: no limit."""

    edges: int | str | None
    """Put this many edge servers between the clients and the cloud: 5 or random:5 divides the clients at random,
    similar:5 brings similar label distributions together, diverse:5 makes each edge server as diverse as possible, and
    none means no edge servers. Default: none, unless the method has some."""

    cloud_every_rounds: int | None
    """Average the models of the edge servers in the cloud once in this many rounds. It must be at least 1. Default: 5
    if there are edge servers."""

    cloud_link: str | None
    """Model the traffic between the edge servers and the cloud as this link: wifi, wifi-slow, lte-m or ethernet.
    Default: ethernet if there are edge servers."""

    fleet: Literal["auto", "plain", "vector", "pool", "flower"]
    """Choose how the clients are executed: plain runs one after the other, vector stacks many in one tensor, pool
    starts worker processes, flower sends Flower messages inside this process, and auto takes what suits the model and
    the machine. Default: "auto"."""

    workers: int | None
    """Start this many processes for the pool fleet. The number changes the speed, but no byte of the result. It must be
    at least 1. Default: one per core."""

    pieces: int | None
    """Divide the clients of a round into this many pieces. One worker trains the clients of a piece together. Runs with
    the same number give the same bytes on any number of cores. It must be at least 1. Default: the number of cores for
    the pool fleet, else no pieces."""
