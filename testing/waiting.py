"""Waiting for what must come: long enough for the slowest machine, and no longer."""

import time
from collections.abc import Callable
from pathlib import Path

# A bound against hanging, not a measure: what is waited for must come.
WAIT_S = 900.0


def wait_until(claim: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int | str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
