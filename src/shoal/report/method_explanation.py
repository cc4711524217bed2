"""What a method does, step by step, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SAID = {
    "what": "what it is",
    "client_sends": "each client sends",
    "client_keeps": "each client keeps",
    "server_learns": "the server learns",
    "remark": "remark",
}


def steps_view(facts: Mapping[str, Any]) -> RenderableType:
    head = f"{facts['method']}: {facts['clients']} clients, a model of {facts['parameters']:,} parameters"
    blocks: list[RenderableType] = [Text(head, style="bold")]
    for step in facts["steps"]:
        title = Text(f"\n{step['step']} = {step['piece']}" if step["step"] else f"\n{step['piece']}", style="bold cyan")
        if step.get("source", "-") != "-":
            title.append(f"   {step['source']}", style="dim")
        blocks += [title, Padding(_body(step), (0, 0, 0, 2))]
    blocks += [Text(f"\nnote: {note}") for note in facts["notes"]]
    blocks.append(Text("\nBytes are counted, joules modelled: of all clients together, in one round.", style="dim"))
    return Group(*blocks)


def _body(step: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for key, label in SAID.items():
        if step.get(key, "nothing") not in ("nothing", ""):
            table.add_row(label, step[key])
    asking = [stage for stage in step["stages"] if stage["schedule"]["clients"] != "none"]
    for stage in asking:
        named = len(asking) > 1 or stage["stage"] not in (step["step"], step["piece"])
        table.add_row(f"when ({stage['stage']})" if named else "when", stage["schedule"]["sentence"])
        for when, cost in stage["costs"].items():
            table.add_row(when, _cost(cost))
    return table


def _cost(cost: Mapping[str, Any]) -> str:
    if not cost["clients"]:
        return "no client receives a task"
    who = "edge servers" if cost["asked"] == "edges" else "clients"
    sent = f"{_bytes(cost['bytes_down'])} down, {_bytes(cost['bytes_up'])} up"
    return f"{cost['clients']:.3g} {who}, {sent}, {cost['joules']:.3g} J"


def _bytes(count: float) -> str:
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
