"""Why a run failed: a record in its run directory, which is removed when the run starts again or resumes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import UserError, one_line_message
from shoal.store.atomic_files import write_json

FAILURE = "failure.json"


@contextmanager
def record_exceptions(path: Path, config: Mapping[str, Any], on_failure: Callable[[str], None]) -> Iterator[None]:
    """Lets an error end only one of several runs.

    The reason is written into the run directory and given to `on_failure`.
    """
    try:
        yield
    except Exception as error:  # one job of many may fail in any way
        details = {} if isinstance(error, UserError) else {"traceback": traceback.format_exc()}
        record_failure(path, config, one_line_message(error), **details)
        on_failure(one_line_message(error))


def record_failure(path: Path, config: Mapping[str, Any], reason: str, **details: str) -> None:
    """Writes why a run failed.

    The record repeats the job, `config`, because a run that failed before it started has no config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / FAILURE, {"reason": reason, "config": dict(config), **details})
