"""Runs Python with a library in front of the allocator that fails when it is told to.

Allocations are counted, so a test can let each one of a call fail in turn and see that
every time an error comes out and the process lives.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing import compiled
from testing.waiting import WAIT_S

MAIN_THREAD, OTHER_THREADS = 1, 2
ALL = 1 << 40


def build(directory: Path) -> Path:
    """Compile the library into the directory."""
    library = directory / "failing.so"
    compiled.build(Path(__file__).with_suffix(".cpp"), library)
    return library


def run_module(name: str, *arguments: str, library: Path) -> str:
    """Run a module of the tests under the library; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        # Loaded later, the C++ runtime allocates when a thread first throws.
        env={**os.environ, "LD_PRELOAD": f"{library} libstdc++.so.6"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def failing(
    where: int, *, least_bytes: int, skip: int, count: int = ALL
) -> Iterator[None]:
    """Of the allocations there of `least_bytes` and more, `count` fail after `skip`."""
    library = ctypes.CDLL(None)
    fail = library.memory_fails
    fail.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
    fail(where, least_bytes, skip, count)
    try:
        yield
    finally:
        fail(0, 0, 0, 0)


def num_failures() -> int:
    """Of the latest `failing` block."""
    return int(ctypes.CDLL(None).memory_failures())
