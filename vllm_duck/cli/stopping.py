"""Ctrl-C, SIGTERM or a lost parent, as one thing that the main thread waits for.

A signal handler that raises can lose its exception inside a callback of C code, and
one that sets a threading.Event can meet the lock that its own thread holds. And none
runs at all while the main thread sleeps and another thread caught the signal. So the
interpreter writes to a pipe, from whatever thread, and the main thread waits for that;
raising is for the time before it waits.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Remembers that this process was asked to stop."""

    def __init__(self) -> None:
        self._read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self._is_raising = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process is asked to stop; returns whether it was."""
        return bool(select.select([self._read_fd], [], [], timeout_s)[0])

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within the block a request also raises KeyboardInterrupt."""
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_raising:
            raise KeyboardInterrupt
