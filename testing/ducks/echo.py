"""The duck of tests and benchmarks of the wire: the hidden rows come back."""

import ctypes
from pathlib import Path
from typing import Any

from testing import compiled
from vllm_duck.executor.duck import MoeRequest, Partial, ReplyDtype
from vllm_duck.executor.wire.bf16 import bf16_to_f32


def echo(request: MoeRequest, reply_dtype: ReplyDtype) -> Partial:
    """In Python, for the grpcio server."""
    return bf16_to_f32(request.hidden) if reply_dtype == "fp32" else request.hidden


def echo_compute() -> object:
    """The same in C++, for the native server, as `ShardMoe.native_compute` gives it."""
    library: Any = compiled.load(Path(__file__).with_suffix(".cpp"))
    for function in (library.echo_compute, library.echo_compute_name):
        function.restype = ctypes.c_void_p
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return make_capsule(library.echo_compute(), library.echo_compute_name(), None)
