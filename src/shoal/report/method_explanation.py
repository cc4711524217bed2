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
    blocks.append(Text("\nBytes are counted, joules modelled, both of all clients together.", style="dim"))
    return Group(*blocks)


def _body(step: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for key, label in SAID.items():
        if step.get(key, "nothing") not in ("nothing", ""):
            table.add_row(label, step[key])
    asking = [stage for stage in step["stages"] if any(cost["clients"] for cost in _costs(stage).values())]
    for stage in asking:
        named = [stage["stage"]] if len(asking) > 1 or stage["stage"] not in (step["step"], step["piece"]) else []
        often = [] if stage["due"] == "every round" else [stage["due"]]
        told = f" ({', '.join(named + often)})" if named or often else ""
        for when, cost in _costs(stage).items():
            table.add_row(when + told, _cost(cost))
    return table


def _costs(stage: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    return {when: cost for when, cost in stage.items() if isinstance(cost, Mapping)}


def _cost(cost: Mapping[str, float]) -> str:
    if not cost["clients"]:
        return "nobody is asked"
    asked = f"{cost['clients']:.3g} clients"
    return f"{asked}, {_bytes(cost['bytes_down'])} down, {_bytes(cost['bytes_up'])} up, {cost['joules']:.3g} J"


def _bytes(count: float) -> str:
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
