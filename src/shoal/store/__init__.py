"""Run directories: the files that a run writes, how they are read, and how a run resumes from them.

Read `run_directory.py` next for the files of a run, and `reader.py` for reading them without resuming.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import UserError

FORMAT = 3  # format of run directories and checkpoints


class FormatError(UserError):
    """A run directory or a checkpoint that another version of shoal wrote. It is not damaged."""


def check_format(path: Path, about: Mapping[str, Any]) -> None:
    """Raises a FormatError if the facts of a run directory or a checkpoint name another format than `FORMAT`."""
    file_format = about.get("format")
    if file_format == FORMAT:
        return
    is_newer = isinstance(file_format, int) and file_format > FORMAT
    writer = f"the version that wrote it, shoal {about['shoal']}," if "shoal" in about else "a newer version of shoal"
    advice = f"use {writer} to read it." if is_newer else "start the run again in a new directory."
    raise FormatError(
        f"{path} was written in format {file_format}, but this version of shoal reads format {FORMAT} only: {advice}"
    )
