"""The fan-out of raw_tls.cpp, called from Python: the yardstick of TLS in rpc.py."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from testing import compiled


class RawTls:
    """So many connections to one server process; one request at a time."""

    def __init__(self, num_ducks: int, port: int) -> None:
        self._library = load()
        self._handle = self._library.tls_connect(num_ducks, port)
        assert self._handle

    def call(
        self, request: npt.NDArray[np.uint8], shape: tuple[int, int]
    ) -> npt.NDArray[np.float32]:
        """Send the bytes to all; the sum of their echoed bf16 bits [T, H]."""
        total = np.empty(shape, np.float32)
        code = self._library.tls_call(
            self._handle,
            request.ctypes.data,
            request.nbytes,
            2 * total.size,
            total.ctypes.data,
        )
        assert code == 0
        return total

    def close(self) -> None:
        self._library.tls_close(self._handle)


@cache
def load() -> Any:
    """The yardstick, which needs OpenSSL's headers."""
    loaded = compiled.load(Path(__file__).with_suffix(".cpp"), "-lssl", "-lcrypto")
    loaded.tls_connect.restype = ctypes.c_void_p
    loaded.tls_call.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    loaded.tls_close.argtypes = [ctypes.c_void_p]
    loaded.tls_serve.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return loaded
