"""Installs packages with pieces into a folder, as pip would do it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shoal.methods.composition import piece


def install(folder: Path, pyproject: str) -> None:
    """Writes the metadata that an installer writes, so that the folder offers the entry points of the project."""
    project = tomllib.loads(pyproject)["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = (f"{name} = {target}\n" for name, target in project["entry-points"]["shoal.pieces"].items())
    (info / "entry_points.txt").write_text("[shoal.pieces]\n" + "".join(lines))


def forget_pieces_afterwards(monkeypatch) -> None:
    """Removes the pieces that the test registers when the test ends."""
    monkeypatch.setattr(piece, "_registry", {step: dict(classes) for step, classes in piece.pieces().items()})
    piece._load_pieces.cache_clear()
