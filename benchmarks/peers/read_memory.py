"""How fast threads read memory: what a kernel with few rows cannot be faster than."""

import ctypes
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from testing import compiled

# More than caches hold.
_NUM_WORDS = 1 << 27


def bytes_per_s(num_threads: int) -> float:
    """Of one pass over a gigabyte."""
    library: Any = compiled.load(Path(__file__).with_suffix(".cpp"), "-march=native")
    read = library.read_memory
    read.restype = ctypes.c_uint64
    read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    words = _words()
    start = time.perf_counter()
    total = read(words.ctypes.data, len(words), num_threads)
    seconds = time.perf_counter() - start
    assert total == len(words)
    return words.nbytes / seconds


@cache
def _words() -> npt.NDArray[np.uint64]:
    return np.ones(_NUM_WORDS, np.uint64)
