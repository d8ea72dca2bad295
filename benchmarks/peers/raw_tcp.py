"""The raw TCP fan-out of raw_tcp.cpp, called from Python: the yardstick of rpc.py."""

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import end_with_parent
from testing import compiled
from vllm_duck.executor.system.cpus import set_thread_cpus, thread_cpus


class RawFanOut:
    """Connections to each address of a server; one request at a time."""

    def __init__(self, library: Any, addresses: Sequence[str], port: int) -> None:
        """library: what `load` gives."""
        self._library = library
        texts = (ctypes.c_char_p * len(addresses))(*map(str.encode, addresses))
        self._handle = self._library.raw_connect(len(addresses), texts, port)
        assert self._handle

    def call(
        self, request: npt.NDArray[np.uint8], shape: tuple[int, int]
    ) -> npt.NDArray[np.float32]:
        """Send the bytes to all; the sum of their echoed bf16 bits [T, H]."""
        total = np.empty(shape, np.float32)
        code = self._library.raw_call(
            self._handle,
            request.ctypes.data,
            request.nbytes,
            2 * total.size,
            total.ctypes.data,
        )
        assert code == 0
        return total

    def close(self) -> None:
        self._library.raw_close(self._handle)


@cache
def load(name: str, *flags: str) -> Any:
    """A yardstick of this folder, compiled as the extensions are."""
    loaded = compiled.load(Path(__file__).with_name(f"{name}.cpp"), *flags)
    loaded.raw_connect.restype = ctypes.c_void_p
    loaded.raw_connect.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.c_int,
    ]
    loaded.raw_call.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    loaded.raw_close.argtypes = [ctypes.c_void_p]
    return loaded


def load_tcp() -> Any:
    """raw_serve takes the address to listen on."""
    return load("raw_tcp")


def load_tls() -> Any:
    """Needs OpenSSL's headers; raw_serve takes a certificate and its key, as files."""
    return load("raw_tls", "-lssl", "-lcrypto")


@contextmanager
def raw_server(prefix: Sequence[str]) -> Iterator[int]:
    """One under the command `prefix`, on all addresses there; gives its port."""
    command = [*prefix, sys.executable, "-m", "benchmarks.peers.raw_tcp"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    argparse.ArgumentParser(description="Serve on all addresses.").parse_args()
    end_with_parent()
    set_thread_cpus(sorted(thread_cpus())[-1:])
    load_tcp().raw_serve(b"0.0.0.0")


if __name__ == "__main__":
    main()
