"""The file through which the worker process hands its figures to the API server.

vLLM carries only its own statistics from the worker to the server. The figures are a
few hundred bytes of JSON, written at most twice a second.
"""

import atexit
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_duck.executor.temporary import temporary_directory

_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


def temporary_file() -> str:
    """A path in a directory that goes away with this process."""
    directory = temporary_directory("vllm-duck-figures-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return f"{directory}/figures.json"


class FiguresFile:
    """Replaced as a whole, so that a reader sees one state."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._next_s = 0.0

    def write_if_due(self, collect: Callable[[], dict[str, Any]]) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(collect()))
            os.replace(fresh, self._path)
        except OSError as error:
            # A full or cleaned /tmp must not end the engine: serve on without figures.
            logger.warning(
                "/metrics has no figures of the ducks from now on: %s", error
            )
            self._next_s = math.inf

    def read(self) -> dict[str, Any] | None:
        """The latest figures, or None where there are none."""
        try:
            figures: dict[str, Any] = json.loads(self._path.read_text())
        except OSError:
            return None
        return figures
