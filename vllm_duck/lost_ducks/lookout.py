"""Looks for ducks that a step has given up, until all of them answer again."""

import threading
from collections.abc import Callable, Mapping

from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus
from vllm_duck.lost_ducks.health import HealthBoard

_INTERVAL_S = 0.5


class Lookout:
    """A thread that asks for missing ducks after a failed step, and tells the board.

    It sleeps while none is missed: a step that does not fail costs it nothing.
    """

    def __init__(
        self, board: HealthBoard, missing: Callable[[], Mapping[str, str]]
    ) -> None:
        """missing: who does not answer, by name, and why; empty: the search ends."""
        self._board = board
        self._missing = missing
        # A step that fails during a look is not cleared by it.
        self._lock = threading.Lock()
        self._is_wanted = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="duck-lookout", daemon=True
        )
        # Not on the one cpu of the thread that computes.
        run_on_cpus(self._thread.start, allowed_cpus())

    def step_failed(self, error: str) -> None:
        with self._lock:
            self._board.step_failed(error)
            self._is_wanted.set()

    def stop(self) -> None:
        self._is_stopped.set()
        self._is_wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while self._is_wanted.wait() and not self._is_stopped.is_set():
            self._is_wanted.clear()
            missing = self._missing()
            with self._lock:
                if missing or not self._is_wanted.is_set():
                    self._board.looked(missing)
            if missing:
                self._is_wanted.set()
                self._is_stopped.wait(_INTERVAL_S)
