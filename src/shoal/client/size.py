"""The number of samples of a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.types import Phase, Report, Task, Tree


@dataclass(frozen=True)
class SendSampleCount:
    """Reports the number of training samples. Nothing else is computed."""

    name: str = "sizes"
    batchable: bool = True
    phases: tuple[Phase, ...] = ()

    def begin(self, task: Task, private: Tree) -> Tree:
        return {}

    def end(self, task: Task, state: Tree, counts: Mapping[str, int]) -> tuple[Report, Tree | None]:
        return Report(counts={"train": counts["train"]}), None
