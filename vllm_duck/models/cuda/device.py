"""What the stage runner asks of a GPU: little enough that a test can be one.

Invariants of who calls it, pinned by tests/models/cuda/test_fake_gpu.py:
- R1 nobody reads memory that nobody has written;
- R2 nobody writes memory while a kernel may still read or write it;
- R3 this machine reads pinned memory once it has seen the flag behind it;
- R4 what a graph reads stays as it is from its launch to its flag;
- R5 a capture allocates nothing, looks at no memory and holds no second capture;
- R6 a graph is replayed with the memory that it was captured with.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

# What `capture` returns, for `launch` alone.
Graph: TypeAlias = Any

# Memory of the device, or pinned memory that both sides see.
BufferT = TypeVar("BufferT", contravariant=True)


class Device(Protocol[BufferT]):
    """One GPU with one stream: what is launched first ends first."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record the kernels that `work` starts; none of them runs."""
        ...

    def launch(self, graph: Graph) -> None:
        """Enqueue the graph and return at once."""
        ...

    def is_raised(self, flag: BufferT, value: int) -> bool:
        """Whether a kernel has put the value into this word of pinned memory.

        What was written before the flag can be read then. It is asked in a loop, so it
        has to be cheap, and has to raise when the GPU has failed: no flag comes then.
        """
        ...

    def host_read(self, buffer: BufferT) -> npt.NDArray[Any]:
        """A view of pinned memory."""
        ...

    def host_write(self, buffer: BufferT, rows: npt.NDArray[np.generic]) -> None:
        """Put rows at the beginning of pinned memory."""
        ...
