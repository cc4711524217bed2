"""Tables about clusters, measured energy and privacy, for the runs that have such results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.report.summary import duration_text, joules_text
from shoal.report.table import ReportTable
from shoal.store.reader import RunRecord, run_labels

CLIENT_PARTS = ("training", "preparation", "communication")
MAX_NAMED_CLIENTS = 12  # of one cluster; a longer list is cut


def appendix_tables(runs: Sequence[RunRecord]) -> list[ReportTable]:
    """Returns the tables that have at least one row."""
    results = [(name, run.result) for name, run in zip(run_labels(runs), runs, strict=True) if run.result]
    tables = (make(results) for make in (_cluster_table, _cluster_joules_table, _measured_energy_table, _privacy_table))
    return [table for table in tables if table.rows]


NamedResults = Sequence[tuple[str, Mapping[str, Any]]]


def _cluster_table(named_results: NamedResults) -> ReportTable:
    rows = [
        (f"{name}\n{cluster['model']}", str(len(cluster["clients"])), _client_list(cluster["clients"]))
        for name, result in named_results
        for cluster in result.get("clusters", ())
    ]
    notes = [
        f"{name}: the adjusted Rand index of these clusters and the planted groups is {result['clusters_ari']:.2f}."
        for name, result in named_results
        if "clusters" in result and "clusters_ari" in result
    ]
    return ReportTable("Clusters", ("Run", "clients", "names"), tuple(rows), notes=tuple(notes))


def _client_list(clients: Sequence[str]) -> str:
    more = len(clients) - MAX_NAMED_CLIENTS
    return ", ".join(clients[:MAX_NAMED_CLIENTS]) + (f" ... and {more} more" if more > 0 else "")


def _cluster_joules_table(named_results: NamedResults) -> ReportTable:
    rows = [
        (
            f"{name}\ncluster {cluster}",
            str(joules["num_clients"]),
            *(joules_text(joules[part]) for part in CLIENT_PARTS),
        )
        for name, result in named_results
        for cluster, joules in result.get("cluster_joules", {}).items()
    ]
    heads = ("Run", "clients", *CLIENT_PARTS)
    return ReportTable(
        "Joules of the clients of each cluster", heads, tuple(rows), notes=("These joules are modelled.",)
    )


def _measured_energy_table(named_results: NamedResults) -> ReportTable:
    measured = [(name, result["measured"]) for name, result in named_results if "measured" in result]
    rows = [
        (
            name,
            *(joules_text(m[k]) for k in ("joules", "cpu_joules", "ram_joules", "gpu_joules")),
            f"{1000 * m['kg_co2']:.3g} g",
            m["country"] or "world",
            duration_text(m["seconds"]),
        )
        for name, m in measured
    ]
    sources = dict.fromkeys(m["source"] for _, m in measured)
    heads = ("Run", "total", "processor", "memory", "GPU", "CO2", "electricity of", "time")
    notes = (
        "CodeCarbon measured this energy. It is not the energy of the clients’ devices.",
        *(f"Source of the processor’s energy: {s}." for s in sources),
    )
    return ReportTable("Energy that the simulation used on this machine", heads, tuple(rows), notes=notes)


def _privacy_table(named_results: NamedResults) -> ReportTable:
    values_by_run = [(name, dict(_flatten(result["privacy"]))) for name, result in named_results if "privacy" in result]
    keys = list(dict.fromkeys(key for _, values in values_by_run for key in values))
    rows = [(name, *(_value_text(values.get(key)) for key in keys)) for name, values in values_by_run]
    notes = ["Record epsilon is for one sample of a client, local epsilon for all samples of a client."]
    if "ari" in keys:
        notes.append("ari is the adjusted Rand index of the clusters with noise and the clusters without noise.")
    heads = ("Run", *(k.replace("_", " ") for k in keys))
    return ReportTable("Differential privacy of what clients send", heads, tuple(rows), notes=tuple(notes))


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
