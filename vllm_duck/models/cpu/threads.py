"""The threads and the instruction set that compute the host's layers.

Invariants of all that runs here, pinned by tests:
- A row's bits depend on that row and on the keys that it sees: not on other rows, the
  number of rows or threads, the row's place in the call, or how a prompt was chunked.
- Every instruction set gives the same bits (values below 2^-126 count as zero).

The order of additions is written down in csrc/host: gemm/gemm.h, kernels/rows.h and
kernels/sparse.h.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_duck.config import ISA_VARIABLE, environment_isa
from vllm_duck.errors import DuckConfigError, DuckShapeError
from vllm_duck.executor.system.cpus import within_quota
from vllm_duck.models.cpu import _host

# A C++ object: packed weights, a batch, the threads.
Handle: TypeAlias = object

# What goes from layer to layer, [T, H] bf16 as bits: to make a tensor takes 15 us
# between layers, with the caches full of weights, and to make an array 3.
Bits = npt.NDArray[np.uint16]
_BITS_DTYPE = np.dtype(np.uint16)

# Waking a sleeping thread takes about 50 us, in which one thread reads 1 MB of weights.
WORK_PER_THREAD = 1 << 20

_current: Handle | None = None


def configure(
    num_threads: int, isa: str = "", *, work_per_thread: int = WORK_PER_THREAD
) -> None:
    """Choose the threads, caller included, and the instruction set; "" is the best.

    A call uses one more thread for each `work_per_thread` bytes of weights it reads.

    Raises:
        DuckConfigError: no such instruction set here, or no thread.
    """
    global _current
    _current = _make(num_threads, isa or environment_isa(), work_per_thread)


def current() -> Handle:
    """The threads that kernels run on.

    Unless configured: as many as torch has, within the cgroup's quota.
    """
    if _current is None:
        configure(within_quota(torch.get_num_threads()))
    assert _current is not None
    return _current


def require_rows(name: str, x: Tensor, size: int) -> Tensor:
    """x as contiguous bf16 rows [T, size] in this machine's memory.

    Raises:
        DuckShapeError: another shape, dtype or device.
    """
    if x.dim() != 2 or x.shape[1] != size or x.dtype != torch.bfloat16 or not x.is_cpu:
        raise DuckShapeError(
            f"{name} must be [T, {size}] bf16 on the CPU, "
            f"got {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    return x.contiguous()


def require_bits(name: str, x: Bits, size: int) -> None:
    """Before C++ reads x: contiguous rows [T, size] of bf16 bits. Takes 0.2 us.

    Raises:
        DuckShapeError: another shape, dtype or layout.
    """
    if not (x.dtype == _BITS_DTYPE and x.flags.c_contiguous and x.shape[1:] == (size,)):
        raise DuckShapeError(
            f"{name} must be [T, {size}] uint16, contiguous, got {x.shape} {x.dtype}, "
            f"strides {x.strides}"
        )


def to_bits(name: str, x: Tensor, size: int) -> Bits:
    """The memory of x [T, size] bf16 as bits.

    Raises:
        DuckShapeError: another shape, dtype or device.
    """
    return require_rows(name, x, size).view(torch.uint16).numpy()


def from_bits(bits: Bits) -> Tensor:
    """The inverse of `to_bits`."""
    return torch.from_numpy(bits).view(torch.bfloat16)


def _make(num_threads: int, name: str, work_per_thread: int) -> Handle:
    if num_threads < 1:
        raise DuckConfigError(f"num_threads must be >= 1, got {num_threads}")
    host = _host.host_new(num_threads, name, work_per_thread)
    if host is None:
        raise DuckConfigError(
            f"{ISA_VARIABLE} must be one of {', '.join(_host.supported_isas())} on "
            f"this machine, got {name!r}"
        )
    return host
