"""Processes that end by themselves are started again, but not over and over.

At once, unless it was started three times within a minute: then when that minute is
over. So a duck that was killed is back soon, and one that cannot live costs little.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus

MAX_STARTS = 3
WITHIN_S = 60.0

logger = logging.getLogger(__name__)


class StartLimit:
    """When a process may be started again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)

    def wait_s(self) -> float:
        """Seconds until the next start."""
        if len(self._starts) < MAX_STARTS:
            return 0.0
        return max(0.0, self._starts[0] + WITHIN_S - self._clock())

    def started(self) -> None:
        self._starts.append(self._clock())


class Keeper:
    """A thread for each of `count` processes, which are known by their index."""

    def __init__(
        self,
        count: int,
        *,
        wait: Callable[[int], object],
        how: Callable[[int], str],
        start: Callable[[int], None],
        limit: Callable[[], StartLimit] = StartLimit,
    ) -> None:
        """wait: until it ends. how: it did. start: another in its place.

        From begin_to_stop() on nothing is started; the owner ends the processes, then
        calls join().
        """
        self.ends: dict[int, str] = {}
        self._wait, self._how, self._start = wait, how, start
        self._lock = threading.Lock()
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._keep, args=(i, limit()), name="duck-keeper", daemon=True
            )
            for i in range(count)
        ]
        cpus = allowed_cpus()
        for thread in self._threads:
            # Not on the one cpu of a worker of vLLM.
            run_on_cpus(thread.start, cpus)

    def begin_to_stop(self) -> None:
        with self._lock:
            self._is_stopping.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _keep(self, index: int, limit: StartLimit) -> None:
        while True:
            self._wait(index)
            with self._lock:
                if self._is_stopping.is_set():
                    return
                end = self.ends[index] = self._how(index)
            wait_s = limit.wait_s()
            logger.warning(
                "%s; starting it again %s",
                end,
                f"in {wait_s:.0f} s, after {MAX_STARTS} times within {WITHIN_S:g} s"
                if wait_s
                else "at once",
            )
            self._is_stopping.wait(wait_s)
            with self._lock:
                if self._is_stopping.is_set():
                    return
                limit.started()
                try:
                    self._start(index)
                except OSError as error:  # no memory, or no process, just now
                    logger.warning("%s, and cannot be started: %s", end, error)
