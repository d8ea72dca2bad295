"""What a remote call costs the host beyond the ducks' compute.

One call goes to two ducks at once. Overhead is the time from before the request is
encoded until the sum of the replies is there, less the slower duck's compute; over
unix sockets and over TCP on loopback, at decode and at prefill sizes. The native stream
against grpcio at both ends, each with ducks of its own, in turns.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main, percentiles
from vllm_duck.executor.duck import ModelSummary, MoeRequest
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.weights.checkpoint import Checkpoint

NUM_DUCKS = 2
NUM_TOPK = 4
ROWS = (1, 2, 64, 1024)
NUM_TURNS = 3


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    summary = Checkpoint(model_dir).summary
    for kind in ("unix", "tcp"):
        with ExitStack() as stack:
            fleets = {}
            for transport in ("native", "grpcio"):
                ducks = stack.enter_context(
                    LocalDucks.start(
                        model_dir,
                        num_ducks=NUM_DUCKS,
                        num_threads=1,
                        listen=None if kind == "unix" else _free_endpoints(NUM_DUCKS),
                        serve_flags=[f"--transport={transport}"],
                    )
                )
                fleets[transport] = stack.enter_context(
                    Fleet.connect(ducks.endpoints, expect=summary, transport=transport)
                )
            for rows in ROWS:
                request = make_request(rows, summary)
                yield from _measure(fleets, request, kind, 200 if quick else 2000)


def _measure(
    fleets: dict[str, Fleet], request: MoeRequest, kind: str, num_calls: int
) -> Iterator[Result]:
    rows = len(request.hidden)
    num_calls = max(20, num_calls // max(1, rows // 16))
    overheads_us: dict[str, list[float]] = {transport: [] for transport in fleets}
    for _ in range(NUM_TURNS):
        for transport, fleet in fleets.items():
            overheads_us[transport] += _overheads_us(fleet, request, num_calls)
    case = f"{kind}, {NUM_DUCKS} ducks, {rows} rows"
    native, grpcio = (percentiles(overheads_us[name]) for name in ("native", "grpcio"))
    for metric, value, peer in zip(
        ("overhead_p50", "overhead_p99"), native, grpcio, strict=True
    ):
        yield Result(case, metric, value, "us", "grpcio", peer)


def _overheads_us(fleet: Fleet, request: MoeRequest, num_calls: int) -> list[float]:
    overheads_us = []
    for _ in range(num_calls + 10):
        start_ns = time.perf_counter_ns()
        done = fleet.send(request).wait()
        elapsed_us = (time.perf_counter_ns() - start_ns) / 1000
        overheads_us.append(elapsed_us - done.times.compute_us)
    return overheads_us[10:]


def make_request(rows: int, summary: ModelSummary) -> MoeRequest:
    """Random rows of a model's first MoE layer, for random experts."""
    rng = np.random.default_rng(0)
    # The upper half of a float32 is a bf16.
    hidden = rng.standard_normal((rows, summary.hidden_size), dtype=np.float32)
    ids = np.argsort(rng.random((rows, summary.n_routed_experts)), axis=1)[:, :NUM_TOPK]
    return MoeRequest(
        layer_idx=summary.layer_ids[0],
        hidden=(hidden.view(np.uint32) >> 16).astype(np.uint16),
        topk_ids=ids.astype(np.int32),
        topk_weights=np.full((rows, NUM_TOPK), 0.25, dtype=np.float32),
    )


def _free_endpoints(count: int) -> list[str]:
    with ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


if __name__ == "__main__":
    main("remote_call", run, __doc__)
