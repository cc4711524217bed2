"""The commands `shoal data list`, `shoal data get` and `shoal data show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shoal.cli.base import AsJson, Force, data_app, err, out, print_json, user_errors
from shoal.cli.flags import DATA_FLAGS, job_flags, overrides, user_flags


@data_app.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sets that have a name, and where each of them is."""
    with user_errors(as_json):
        from dataclasses import asdict

        from shoal.data.sources import list_datasets

        sets = list_datasets()
        if as_json:
            print_json({"data": [asdict(s) for s in sets]})
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "train", "test", "classes", "shape", "where"):
            table.add_column(heading, no_wrap=heading == "name", overflow="fold")
        for s in sets:
            rows = [f"{n:,}" for n in s.num_samples] if s.num_samples else ["varies"] * 2
            table.add_row(s.name, *rows, str(s.num_classes), " x ".join(map(str, s.shape)), s.where)
        out.print(table)
        out.print("`shoal data list --json` prints licences and home pages.", highlight=False)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="Download this data set. `shoal data list` shows the names.")],
    as_json: AsJson = False,
) -> None:
    """Download a data set into the cache and check its checksum, unless it is there already."""
    with user_errors(as_json):
        from shoal.cli.progress import DownloadProgress
        from shoal.data.sources import get_folder

        with DownloadProgress(err) as progress:
            folder = get_folder(name, progress=progress)
        if as_json:
            print_json({"name": name, "folder": str(folder)})
        else:
            out.print(str(folder), highlight=False, soft_wrap=True)


@data_app.command("show")
@job_flags(*DATA_FLAGS)
def data_show(
    data: Annotated[
        str, typer.Argument(help="Show this data set: a name from `shoal data list`, or the path of your own data.")
    ] = "digits",
    out_path: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Draw the partition on an HTML page in this file.", show_default="no page"),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Show how a data set is divided: the samples of each client and class, and how much the clients differ."""
    with user_errors(as_json):
        from shoal.cli.progress import DownloadProgress
        from shoal.experiment.assemble import load_federation, partition_facts
        from shoal.experiment.job import make_job
        from shoal.report import PAGE, partition_view, write_partition_page
        from shoal.store.outputs import check_output

        if out_path is not None:
            check_output(out_path, PAGE, force)
        with DownloadProgress(err) as progress:
            facts = partition_facts(load_federation(make_job(overrides(user_flags(flags) | {"data": data})), progress))
        page = write_partition_page(facts, out_path, force) if out_path else None
        if as_json:
            print_json(facts | {"page": str(page) if page else None})
            return
        out.print(partition_view(facts))
        if page:
            out.print(f"page: {page}", highlight=False, soft_wrap=True)
