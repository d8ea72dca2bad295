"""The file through which the worker process hands its figures to the API server.

vLLM carries only its own statistics from the worker to the server. The figures are a
few hundred bytes of JSON, written at most twice a second.
"""

import json
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus
from vllm_duck.executor.system.temporary import temporary_directory

_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


def temporary_folder() -> str:
    """A directory that goes away with this process."""
    directory = temporary_directory("vllm-duck-figures-")
    # At exit vLLM ends its engine by a younger finalizer, which comes first: a worker
    # may write until then.
    weakref.finalize(temporary_folder, shutil.rmtree, directory, ignore_errors=True)
    return str(directory)


class FiguresFile:
    """Replaced as a whole, so that a reader sees one state."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, figures: dict[str, Any]) -> None:
        """Raises: OSError."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(figures))
        os.replace(fresh, self._path)

    def read(self) -> dict[str, Any] | None:
        """The latest figures, or None where there are none."""
        try:
            figures: dict[str, Any] = json.loads(self._path.read_text())
        except OSError:
            return None
        return figures


class FiguresWriter:
    """Writes what `collect` gives, after steps, at most twice a second, until stop().

    In a thread of its own, so that the last step before a pause is in the file too.
    """

    def __init__(self, path: str | Path, collect: Callable[[], dict[str, Any]]) -> None:
        self._file = FiguresFile(path)
        self._collect = collect
        self._has_news = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="duck-figures", daemon=True
        )
        # Not on the one cpu of the thread that computes.
        run_on_cpus(self._thread.start, allowed_cpus())

    def step_done(self) -> None:
        self._has_news.set()

    def stop(self) -> None:
        """Collect no more: what the figures are made of may go now."""
        self._is_stopped.set()
        self._has_news.set()
        self._thread.join()

    def _run(self) -> None:
        while self._has_news.wait() and not self._is_stopped.is_set():
            self._has_news.clear()
            try:
                self._file.write(self._collect())
            except OSError as error:
                # A full or cleaned /tmp must not end the engine: serve on without.
                logger.warning(
                    "/metrics has no figures of the ducks from now on: %s", error
                )
                return
            self._is_stopped.wait(_INTERVAL_S)
