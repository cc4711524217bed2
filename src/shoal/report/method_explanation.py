"""Draws what `shoal explain` prints: the steps of a method and what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
STEP_LABELS = {
    "summary": "what it does",
    "client_sends": "each client sends",
    "client_keeps": "each client keeps",
    "server_learns": "the server learns",
    "remark": "remark",
}


def steps_view(facts: Mapping[str, Any]) -> RenderableType:
    """Returns the facts of `shoal.experiment.explain` as text with one block per step."""
    head = f"{facts['method']}: {facts['num_clients']} clients, a model of {facts['num_parameters']:,} parameters"
    blocks: list[RenderableType] = [Text(head, style="bold")]
    for step in facts["steps"]:
        title = Text(f"\n{step['step']} = {step['piece']}" if step["step"] else f"\n{step['piece']}", style="bold cyan")
        if step.get("source", "-") != "-":
            title.append(f"   {step['source']}", style="dim")
        blocks += [title, Padding(_step_table(step), (0, 0, 0, 2))]
    blocks += [Text(f"\nnote: {remark}") for remark in facts["notes"]]
    note = "Costs are totals over all clients in one round. Bytes are counted, joules are modelled."
    blocks.append(Text(f"\n{note}", style="dim"))
    return Group(*blocks)


def _step_table(step: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for key, label in STEP_LABELS.items():
        if step.get(key, "nothing") not in ("nothing", ""):
            table.add_row(label, step[key])
    client_stages = [stage for stage in step["stages"] if stage["schedule"]["clients"] != "none"]
    for stage in client_stages:
        named = len(client_stages) > 1 or stage["stage"] not in (step["step"], step["piece"])
        table.add_row(f"when ({stage['stage']})" if named else "when", stage["schedule"]["sentence"])
        for when, cost in stage["costs"].items():
            table.add_row(when, _cost_text(cost))
    return table


def _cost_text(cost: Mapping[str, Any]) -> str:
    if not cost["num_clients"]:
        return "no client receives a task"
    recipients = "edge servers" if cost["recipients"] == "edges" else "clients"
    sent = f"{_bytes_text(cost['bytes_down'])} down, {_bytes_text(cost['bytes_up'])} up"
    return f"{cost['num_clients']:.3g} {recipients}, {sent}, {cost['joules']:.3g} J"


def _bytes_text(num_bytes: float) -> str:
    for size, unit in BYTE_UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"
