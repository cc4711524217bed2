"""Newer checkpoints of a run that another process is still training."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.store.checkpoint import Checkpoints
from shoal.types import ServerState

log = logging.getLogger(__name__)


class Watch:
    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._seen: tuple[int, ...] | None = None
        self._told: tuple[int, str] | None = None  # said once

    def newer(self, take_up: Callable[[ServerState], None]) -> bool:
        """Takes up the newest checkpoint that is whole, unless it is the one that was taken up last.

        The run's own process discards old checkpoints at any time: one that vanishes while it is read, or is damaged,
        is passed over, for there is an older one, or soon a newer.
        """
        for round in reversed(self.checkpoints.rounds()):
            try:
                mark = self.checkpoints.fingerprint(round)
                if mark == self._seen:
                    return False
                take_up(self.checkpoints.load(round).state)
            except (OSError, ValueError, KeyError) as error:
                if (round, str(error)) != self._told:
                    log.warning("the checkpoint of round %d cannot be read now: %s", round, error)
                self._told = (round, str(error))
                continue
            self._seen = mark
            return True
        return False
