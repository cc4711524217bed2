"""Packages that offer pieces, installed into a folder as pip would do it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shoal.methods.composition import piece


def install(folder: Path, pyproject: str) -> None:
    """Writes what an installer writes of a project's metadata: the folder then offers its entry points."""
    project = tomllib.loads(pyproject)["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = (f"{name} = {target}\n" for name, target in project["entry-points"]["shoal.pieces"].items())
    (info / "entry_points.txt").write_text("[shoal.pieces]\n" + "".join(lines))


def forget_pieces_afterwards(monkeypatch) -> None:
    """Pieces that are registered from now on are not known to the next test."""
    monkeypatch.setattr(piece, "_registry", {step: dict(found) for step, found in piece.pieces().items()})
    piece._load_pieces.cache_clear()
