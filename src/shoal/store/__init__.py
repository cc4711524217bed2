"""Run directories: the files that a run writes, how they are read, and how a run resumes from them.

Read `run_directory.py` next for the files of a run, and `reader.py` for reading them without resuming.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import UserError

FORMAT = 3  # format of run directories and checkpoints


def check_format(path: Path, about: Mapping[str, Any]) -> None:
    """Raises a UserError if the facts in about.json name another format than the one that this version reads."""
    file_format = about.get("format")
    if file_format != FORMAT:
        raise UserError(
            f"{path} was written in format {file_format}, but this version of shoal reads format {FORMAT} only: "
            "start the run again in a new directory."
        )
