"""A duck that sleeps instead of computing: any duck time on any machine.

It holds all experts, answers zeros, and takes as long as its pace file says at the
moment. Sleeping takes no core away from the host; but waking up on a busy core would
take time that no machine of its own takes: so it has the last cpu, and a host that is
measured should `leave_a_cpu`.
"""

import argparse
import ctypes
import mmap
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import end_with_parent, running, serve
from testing.step_model import num_experts
from vllm_duck.executor.duck import (
    PROTOCOL_VERSION,
    DuckInfo,
    Shard,
)
from vllm_duck.executor.native.server import NativeDuckServer
from vllm_duck.executor.system.cpus import set_thread_cpus, thread_cpus
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.wire.security import ServerSecurity

_PR_SET_TIMERSLACK = 29


class Pace:
    """Seconds that a call takes, shared by a file of eight bytes.

    A negative number are the seconds of a row: a call takes longer by the distinct
    experts that so many rows choose on the average (testing/step_model.py).
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def seconds(self, num_rows: int) -> float:
        pace_s = self.call_s
        return pace_s if pace_s >= 0 else -pace_s * num_experts(num_rows)

    @property
    def call_s(self) -> float:
        return float(struct.unpack("d", self._map[:8])[0])

    @call_s.setter
    def call_s(self, value: float) -> None:
        self._map[:8] = struct.pack("d", value)


def leave_a_cpu() -> None:
    """Keep this thread, and those it will start, off the paced ducks' cpu."""
    set_thread_cpus(sorted(thread_cpus())[:-1] or thread_cpus())


@contextmanager
def paced_duck(
    model_dir: Path, *, listen: str = "", prefix: Sequence[str] = ()
) -> Iterator[tuple[str, Path]]:
    """Run one; `prefix` is a command to run it under. Gives its endpoint, pace file."""
    with tempfile.TemporaryDirectory(prefix="paced-") as directory:
        path = Path(directory) / "pace"
        path.write_bytes(bytes(8))
        endpoint = listen or f"unix:{directory}/duck"
        command = [
            sys.executable,
            "-m",
            "benchmarks.overlap.paced_duck",
            str(model_dir),
        ]
        with running([*prefix, *command, endpoint, str(path)]):
            yield endpoint, path


class _ForwardCall(ctypes.Structure):
    """As in csrc/base/compute.h."""

    _fields_ = (
        ("layer_idx", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("hidden_size", ctypes.c_uint32),
        ("num_topk", ctypes.c_uint32),
        ("hidden", ctypes.c_void_p),
        ("topk_ids", ctypes.c_void_p),
        ("topk_weights", ctypes.c_void_p),
        ("out_fp32", ctypes.c_void_p),
        ("out_bf16", ctypes.c_void_p),
    )


_Forward = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(_ForwardCall),
    ctypes.c_void_p,
    ctypes.c_size_t,
)


class _Compute(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("forward", _Forward))


_CAPSULE_NAME = b"vllm_duck.Compute"
_OK = 1


def _capsule(answer: Callable[[_ForwardCall], None]) -> object:
    """`answer` as what a native server computes with; for the life of the process."""

    def forward(_context: object, call: Any, _error: object, _size: int) -> int:
        answer(call[0])
        return _OK

    compute = _Compute(None, _Forward(forward))
    _kept.append(compute)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule: object = new(ctypes.addressof(compute), _CAPSULE_NAME, None)
    return capsule


_kept: list[_Compute] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("listen")
    parser.add_argument("pace", type=Path)
    args = parser.parse_args()
    set_thread_cpus(sorted(thread_cpus())[-1:])
    end_with_parent()
    # Sleeps end 50 us late by default.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    pace = Pace(args.pace)
    summary = Checkpoint(args.model).summary
    info = DuckInfo(
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=summary.fingerprint,
        layer_ids=summary.layer_ids,
        hidden_size=summary.hidden_size,
        moe_intermediate_size=summary.moe_intermediate_size,
        n_routed_experts=summary.n_routed_experts,
        weight_format=summary.weight_format,
        shard=Shard(0, summary.moe_intermediate_size, 0, summary.n_routed_experts),
        isa="sleep",
        num_threads=1,
        weight_bytes=0,
        resident_bytes=resident_bytes(),
    )

    def sleep(call: _ForwardCall) -> None:
        time.sleep(pace.seconds(call.num_rows))
        count = call.num_rows * call.hidden_size
        if call.out_fp32:
            ctypes.memset(call.out_fp32, 0, 4 * count)
        else:
            ctypes.memset(call.out_bf16, 0, 2 * count)

    # It holds nothing worth a token.
    security = ServerSecurity(is_insecure=True)
    server = NativeDuckServer(
        _capsule(sleep), info, listen=args.listen, security=security
    )
    serve(server.start)


if __name__ == "__main__":
    main()
