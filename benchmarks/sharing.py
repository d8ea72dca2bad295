"""What hosts that share a duck cost each other.

One host decodes, calls of 2 rows one after the other, alone and while another sends
prompts, calls of 2,048 rows without a pause; the native server against grpcio's, which
computes calls as they come. Then three hosts that always have requests waiting, of
32, 64 and 1,024 rows: how many rows each gets.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main, percentiles
from benchmarks.remote_call import make_request
from vllm_duck.executor.duck import MoeRequest
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.weights.checkpoint import Checkpoint

DECODE_ROWS = 2
PROMPT_ROWS = 2048
# Calls of 2 rows would keep their host busier than the duck.
SATURATING_ROWS = (32, 64, 1024)
# Requests that a saturating host has in flight.
IN_FLIGHT = 8
NUM_TURNS = 3


def run(quick: bool) -> Iterator[Result]:
    summary = Checkpoint(MODEL_DIR).summary
    requests = {
        rows: make_request(rows, summary)
        for rows in (DECODE_ROWS, PROMPT_ROWS, *SATURATING_ROWS)
    }
    seconds = 2.0 if quick else 10.0
    with ExitStack() as stack:
        ducks = {
            transport: stack.enter_context(
                LocalDucks.start(
                    MODEL_DIR,
                    num_ducks=1,
                    num_threads=1,
                    serve_flags=[f"--transport={transport}"],
                )
            )
            for transport in ("native", "grpcio")
        }
        yield from _decoding(ducks, requests, seconds)
        yield _saturating(ducks["native"], requests, 3 * seconds)


def _decoding(
    ducks: dict[str, LocalDucks], requests: dict[int, MoeRequest], seconds: float
) -> Iterator[Result]:
    times_ms: dict[tuple[str, bool], list[float]] = {}
    for _ in range(NUM_TURNS):
        for transport, each in ducks.items():
            for is_shared in (False, True):
                found = _call_times_ms(
                    each, requests, seconds / NUM_TURNS, is_shared=is_shared
                )
                times_ms.setdefault((transport, is_shared), []).extend(found)
    for is_shared, case in ((False, "decode alone"), (True, "decode beside prompts")):
        native, grpcio = (
            percentiles(times_ms[transport, is_shared])
            for transport in ("native", "grpcio")
        )
        for metric, value, peer in zip(("p50", "p99"), native, grpcio, strict=True):
            yield Result(case, metric, value, "ms a call", "grpcio", peer)
    slice_ms = _prompt_call_ms(ducks["native"], requests[PROMPT_ROWS])
    yield Result("a prompt's call, alone", "p50", slice_ms, "ms a call")


def _call_times_ms(
    ducks: LocalDucks,
    requests: dict[int, MoeRequest],
    seconds: float,
    *,
    is_shared: bool,
) -> list[float]:
    times_ms: list[float] = []
    with ExitStack() as stack:
        if is_shared:
            stack.enter_context(_Host(ducks, requests[PROMPT_ROWS], in_flight=2))
        fleet = stack.enter_context(Fleet.connect(ducks.endpoints))
        fleet.send(requests[DECODE_ROWS]).wait()
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            start_s = time.perf_counter()
            fleet.send(requests[DECODE_ROWS]).wait()
            times_ms.append(1e3 * (time.perf_counter() - start_s))
    return times_ms


def _prompt_call_ms(ducks: LocalDucks, request: MoeRequest) -> float:
    with Fleet.connect(ducks.endpoints) as fleet:
        calls = [fleet.send(request).wait().times.compute_us for _ in range(5)]
    return float(np.median(calls)) / 1e3


def _saturating(
    ducks: LocalDucks, requests: dict[int, MoeRequest], seconds: float
) -> Result:
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(_Host(ducks, requests[rows], in_flight=IN_FLIGHT))
            for rows in SATURATING_ROWS
        ]
        before = [host.num_rows for host in hosts]
        time.sleep(seconds)
        rows = [h.num_rows - b for h, b in zip(hosts, before, strict=True)]
    sizes = ", ".join(str(rows) for rows in SATURATING_ROWS)
    return Result(
        f"three hosts, calls of {sizes} rows",
        "least rows of most",
        min(rows) / max(rows),
        "x",
        target="0.9",
    )


class _Host:
    """A thread that always has `in_flight` requests at a duck, for a `with` block."""

    def __init__(self, ducks: LocalDucks, request: MoeRequest, in_flight: int) -> None:
        self.num_rows = 0
        self._ducks, self._request = ducks, request
        self._in_flight = in_flight
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Host":
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with Fleet.connect(self._ducks.endpoints) as fleet:
            pending = deque(fleet.send(self._request) for _ in range(self._in_flight))
            while pending:
                pending.popleft().wait()
                self._has_begun.set()
                self.num_rows += len(self._request.hidden)
                if not self._is_over.is_set():
                    pending.append(fleet.send(self._request))


if __name__ == "__main__":
    main("sharing", run, __doc__)
