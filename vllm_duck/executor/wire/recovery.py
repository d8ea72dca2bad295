"""Ducks that are lost: how long they are waited for, what log and error say of them.

The native stream has the same numbers in csrc/stream/client/link.cpp.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vllm_duck.errors import DuckUnavailable

logger = logging.getLogger(__name__)

# A request is sent on at most this many connections: it may be what kills the duck.
MAX_SENDS = 3
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 2.0

# A duck whose cable is loose is lost many times a second.
_LOG_EVERY_S = 10.0


@dataclass
class StepLimit:
    """When a step gives its lost ducks up, however short they have been lost."""

    # `time.monotonic`.
    end_s: float = math.inf


class Watcher(Protocol):
    """Who wants to know of each duck that is lost, or back; from any thread."""

    def lost(self, name: str, reason: str) -> None: ...

    def back(self, name: str) -> None: ...


def backoff_s(num_losses: int) -> float:
    """Before the next connection, after so many in a row that gave no answer."""
    if num_losses <= 1:
        return 0.0
    return min(_FIRST_BACKOFF_S * 2.0 ** (num_losses - 2), _LONGEST_BACKOFF_S)


class RecoveryLog:
    """One line when a duck is lost, one when it is back, and not too many of them.

    The watcher hears of each.
    """

    def __init__(
        self,
        watcher: Watcher | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watcher = watcher
        self._clock = clock
        # By the duck's name: when its loss was last said, and how many were not since.
        self._said_at: dict[str, float] = {}
        self._num_unsaid: dict[str, int] = {}

    def lost(self, name: str, reason: str, recover_s: float) -> None:
        if self._watcher is not None:
            self._watcher.lost(name, reason)
        now = self._clock()
        if now < self._said_at.get(name, -_LOG_EVERY_S) + _LOG_EVERY_S:
            self._num_unsaid[name] = self._num_unsaid.get(name, 0) + 1
            return
        self._said_at[name] = now
        num_unsaid = self._num_unsaid.pop(name, 0)
        logger.warning(
            "duck %s is lost (%s)%s; trying it again for recover_s=%g",
            name,
            reason,
            f", and was {num_unsaid} times more since the last such line"
            if num_unsaid
            else "",
            recover_s,
        )

    def back(self, name: str, lost_s: float) -> None:
        if self._watcher is not None:
            self._watcher.back(name)
        if lost_s >= _LOG_EVERY_S or not self._num_unsaid.get(name):
            logger.warning("duck %s is back after %.1f s", name, lost_s)


def gave_up(name: str, lost_s: float, recover_s: float, reason: str) -> DuckUnavailable:
    """The error of a duck that was not back in time."""
    return DuckUnavailable(
        f"duck {name} has been lost for {lost_s:.1f} s with recover_s={recover_s:g} "
        f"({reason}); start it again, or raise recover_s if that takes longer"
    )
