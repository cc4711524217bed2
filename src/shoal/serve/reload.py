"""Newer checkpoints of a run that another process is still training."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.store.checkpoint import Checkpoints
from shoal.types import ServerState

log = logging.getLogger(__name__)


class CheckpointWatcher:
    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._loaded_mark: tuple[int, ...] | None = None
        self._last_warning: tuple[int, str] | None = None  # said once

    def load_newer(self, on_state: Callable[[ServerState], None]) -> bool:
        """Takes up the newest checkpoint that is whole, unless it is the one that was taken up last.

        The run's own process discards old checkpoints at any time: one that vanishes while it is read, or is damaged,
        is passed over, for there is an older one, or soon a newer.
        """
        for round_index in reversed(self.checkpoints.rounds()):
            try:
                mark = self.checkpoints.fingerprint(round_index)
                if mark == self._loaded_mark:
                    return False
                on_state(self.checkpoints.load(round_index).state)
            except (OSError, ValueError, KeyError) as error:
                if (round_index, str(error)) != self._last_warning:
                    log.warning("the checkpoint of round %d cannot be read now: %s", round_index, error)
                self._last_warning = (round_index, str(error))
                continue
            self._loaded_mark = mark
            return True
        return False
