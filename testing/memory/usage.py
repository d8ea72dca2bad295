"""How much memory of this process a call makes resident, as Linux counts it."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_STATUS = Path("/proc/self/status")
# Writing a 5 lets the peak begin anew.
_CLEAR_REFS = Path("/proc/self/clear_refs")


def most_new_bytes(call: Callable[[], T]) -> tuple[T, int]:
    """What the call returns, and the most memory that came on top while it ran."""
    _CLEAR_REFS.write_text("5")
    before = _bytes("VmHWM")
    result = call()
    return result, _bytes("VmHWM") - before


def _bytes(name: str) -> int:
    (line,) = [row for row in _STATUS.read_text().splitlines() if row.startswith(name)]
    return 1024 * int(line.split()[1])
