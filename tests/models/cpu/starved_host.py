"""Lets each large allocation of a linear fail in turn: in the caller, in its threads.

Run by test_out_of_memory.py under the library of testing/memory/failing.py.
"""

import torch

from testing.filled import filled
from testing.host_threads import using
from testing.memory.failing import MAIN_THREAD, OTHER_THREADS, failing, num_failures
from vllm_duck.models.cpu.linear import Linear

# Wide, so that each thread's copy of a few rows is an allocation of its own.
IN_FEATURES = 700_000
LEAST_BYTES = 8 << 20


def num_errors(linear: Linear, x: torch.Tensor, where: int) -> int:
    """How many allocations of a call can fail; each time the next call is right."""
    expected = linear(x)
    for skip in range(10):
        # Threads that were never used: their scratch is still to come.
        with using(4, "portable", work_per_thread=1):
            try:
                with failing(where, least_bytes=LEAST_BYTES, skip=skip):
                    linear(x)
            except MemoryError:
                assert num_failures() > 0
            else:
                assert num_failures() == 0
                return skip
            assert torch.equal(linear(x), expected)
    raise AssertionError("a call has no end of allocations")


def main() -> None:
    linear = Linear(IN_FEATURES, 64)
    filled(linear, 1e-3)
    x = torch.randn(2, IN_FEATURES).bfloat16()
    print("main", num_errors(linear, x, MAIN_THREAD))
    print("others", num_errors(linear, x, OTHER_THREADS))


if __name__ == "__main__":
    main()
