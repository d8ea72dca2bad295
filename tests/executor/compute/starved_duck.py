"""Lets each allocation of a duck's server threads fail in turn, or all from it on.

Run by test_out_of_memory.py under the library of testing/memory/failing.py; prints what
the host was told each time.

    python -m tests.executor.compute.starved_duck NUM_ROWS LEAST_BYTES COUNT
"""

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from testing.ducks.mini_model import WHOLE, make_mini_model, make_request
from testing.memory.failing import OTHER_THREADS, failing, num_failures
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckError
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.native.client import NativeFanOut
from vllm_duck.executor.native.server import NativeDuckServer
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.security import ClientSecurity

MAX_ALLOCATIONS = 500


@contextmanager
def fresh_duck(loaded):
    """A host's calls to a duck whose kernel has all of its buffers still to come."""
    moe = ShardMoe(loaded, MoeKernel(num_threads=2))
    server = NativeDuckServer(moe.native_compute(), moe.info, listen="127.0.0.1:0")
    server.start()
    # Not the Fleet: grpcio's threads end the process where they find no memory.
    fan_out = NativeFanOut(
        [server.endpoint],
        identities=[identity_of(moe.info)],
        deadline_s=WAIT_S,
        reply_dtype="bf16",
        security=ClientSecurity(),
    )
    try:
        fan_out.send(make_request(1)).wait()
        yield fan_out
    finally:
        fan_out.close()
        server.stop(1)


def main() -> None:
    num_rows, least_bytes, count = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint(make_mini_model().write(Path(directory)))
        loaded = load_shard(checkpoint, WHOLE, show_progress=False)
    request = make_request(num_rows)
    expected = bf16_to_f32(ShardMoe(loaded, MoeKernel(num_threads=1))(request, "bf16"))
    for skip in range(MAX_ALLOCATIONS):
        with fresh_duck(loaded) as fan_out:
            with failing(
                OTHER_THREADS, least_bytes=least_bytes, skip=skip, count=count
            ):
                try:
                    np.testing.assert_array_equal(
                        fan_out.send(request).wait().total, expected
                    )
                    answer = "the sum"
                except DuckError as error:
                    answer = str(error)
            if not num_failures():
                return
            print(answer, flush=True)
            np.testing.assert_array_equal(fan_out.send(request).wait().total, expected)
    raise AssertionError("a call has no end of allocations")


if __name__ == "__main__":
    main()
