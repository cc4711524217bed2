"""What a run's result says besides accuracy and cost: groups, what this machine drew, what noise protects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.report.cost_curves import JOULE_PART_NAMES
from shoal.report.summary import duration_text, joules_text
from shoal.report.table import ReportTable
from shoal.store.reader import RunRecord, run_labels

CLIENT_PARTS = ("train", "pre", "comm")
MAX_NAMED_CLIENTS = 12  # members of a group


def appendix_tables(runs: Sequence[RunRecord]) -> list[ReportTable]:
    """Those for which any run has something to say."""
    named = [(name, run.result) for name, run in zip(run_labels(runs), runs, strict=True) if run.result]
    sheets = (make(named) for make in (_cluster_table, _cluster_joules_table, _measured_energy_table, _privacy_table))
    return [sheet for sheet in sheets if sheet.rows]


NamedResults = Sequence[tuple[str, Mapping[str, Any]]]


def _cluster_table(named_results: NamedResults) -> ReportTable:
    rows = [
        (f"{name}\n{group['expert']}", str(len(group["clients"])), _client_list(group["clients"]))
        for name, result in named_results
        for group in result.get("groups", ())
    ]
    notes = [
        f"{name}: adjusted Rand index with the planted groups {result['groups_ari']:.2f}."
        for name, result in named_results
        if "groups" in result and "groups_ari" in result
    ]
    return ReportTable("Groups", ("Run", "clients", "who"), tuple(rows), notes=tuple(notes))


def _client_list(clients: Sequence[str]) -> str:
    more = len(clients) - MAX_NAMED_CLIENTS
    return ", ".join(clients[:MAX_NAMED_CLIENTS]) + (f" ... and {more} more" if more > 0 else "")


def _cluster_joules_table(named_results: NamedResults) -> ReportTable:
    rows = [
        (f"{name}\ngroup {group}", str(found["clients"]), *(joules_text(found[part]) for part in CLIENT_PARTS))
        for name, result in named_results
        for group, found in result.get("joules_of_groups", {}).items()
    ]
    heads = ("Run", "clients", *(JOULE_PART_NAMES[part] for part in CLIENT_PARTS))
    return ReportTable(
        "Joules of the groups that a method formed", heads, tuple(rows), notes=("Of clients, modelled.",)
    )


def _measured_energy_table(named_results: NamedResults) -> ReportTable:
    known = [(name, result["measured"]) for name, result in named_results if "measured" in result]
    rows = [
        (
            name,
            *(joules_text(m[k]) for k in ("joules", "cpu_joules", "ram_joules", "gpu_joules")),
            f"{1000 * m['kg_co2']:.3g} g",
            m["country"] or "world",
            duration_text(m["seconds"]),
        )
        for name, m in known
    ]
    sources = dict.fromkeys(m["source"] for _, m in known)
    heads = ("Run", "together", "processor", "memory", "GPU", "CO2", "electricity of", "time")
    notes = ("By CodeCarbon; the clients’ devices are another thing.", *(f"Processor: {s}." for s in sources))
    return ReportTable("What this machine used to simulate", heads, tuple(rows), notes=notes)


def _privacy_table(named_results: NamedResults) -> ReportTable:
    known = [(name, dict(_flatten(result["privacy"]))) for name, result in named_results if "privacy" in result]
    keys = list(dict.fromkeys(key for _, found in known for key in found))
    rows = [(name, *(_value_text(found.get(key)) for key in keys)) for name, found in known]
    notes = ["ε for one row (record) and for all of a client’s data (local), at this δ."]
    notes += ["ARI: groups with noise beside those without."] if "ari" in keys else []
    heads = ("Run", *(k.replace("_", " ") for k in keys))
    return ReportTable("What noise protects", heads, tuple(rows), notes=tuple(notes))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def _value_text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
