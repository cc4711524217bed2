"""Watches the checkpoints of a run that another process may still be training."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.store.checkpoint import Checkpoints
from shoal.types import ServerState

log = logging.getLogger(__name__)


class CheckpointWatcher:
    """Loads the newest checkpoint when there is a newer one."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._loaded_mark: tuple[int, ...] | None = None
        self._last_warning: tuple[int, str] | None = None  # so that the same warning is logged once

    def load_newer(self, on_state: Callable[[ServerState], None]) -> bool:
        """Calls `on_state` with the newest complete checkpoint, unless it is the last one that was loaded.

        Returns whether there was a newer checkpoint. A checkpoint that is damaged, or that the run deletes while it is
        read, is skipped: there is an older one, or there will soon be a newer one.
        """
        for round_index in reversed(self.checkpoints.rounds()):
            try:
                mark = self.checkpoints.fingerprint(round_index)
                if mark == self._loaded_mark:
                    return False
                on_state(self.checkpoints.load(round_index).state)
            except (OSError, ValueError, KeyError) as error:
                if (round_index, str(error)) != self._last_warning:
                    log.warning("The checkpoint of round %d cannot be read now: %s", round_index, error)
                self._last_warning = (round_index, str(error))
                continue
            self._loaded_mark = mark
            return True
        return False
