"""How long a host takes to go on when a duck that was killed is back.

Real ducks with the bundled model on unix sockets, a call in flight at both of them. One
is killed (SIGKILL) and started again after a random time. `from its return` is from the
moment that it serves until the call is answered; `from the kill` is all of it, for a
duck that is started again by who started it, and for one that has a replica. Each
answer is compared with an undisturbed one.
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.common import MODEL_DIR, Result, main
from vllm_duck.executor.duck import ModelSummary, MoeRequest
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.weights.checkpoint import Checkpoint

RECOVER_S = 600.0
# On top of the second that a start takes: some are waited for with the longest backoff.
LONGEST_OUTAGE_S = 4.0
NUM_ROWS = 2
SEED = 0


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    num_rounds = 10 if quick else 100
    request = _request(Checkpoint(model_dir).summary)
    for case, measure in (
        ("back after 1-5 s", _from_its_return),
        ("started again by its host", _kept),
        ("with a replica", _with_a_replica),
    ):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            seconds = measure(model_dir, folder, request, num_rounds, stack)
        since = "from its return" if measure is _from_its_return else "from the kill"
        for percent in (50, 99):
            value = 1000 * float(np.percentile(seconds, percent))
            yield Result(
                f"{case}, {num_rounds} kills", f"p{percent} {since}", value, "ms"
            )


def _from_its_return(
    model_dir: Path, folder: str, request: MoeRequest, num_rounds: int, stack: ExitStack
) -> list[float]:
    listen = [f"unix:{folder}/{i}" for i in range(2)]
    running = [_start(model_dir, listen, stack)]
    fleet = stack.enter_context(Fleet.connect(listen, recover_s=RECOVER_S))
    expected = _answer(fleet, request)
    outages = random.Random(SEED)
    seconds = []
    for i in range(num_rounds):
        _kill(running[-1], -1)
        waiting = _Waiting(fleet, request)
        time.sleep(outages.uniform(0, LONGEST_OUTAGE_S))
        # The first one lives on; a spare takes its place in the list.
        spare = f"unix:{folder}/spare{i}"
        running.append(_start(model_dir, [spare, listen[1]], stack))
        back_s = time.monotonic()
        seconds.append(max(0.0, waiting.end_s(expected) - back_s))
        _kill(running[-1], 0)
    return seconds


def _kept(
    model_dir: Path, folder: str, request: MoeRequest, num_rounds: int, stack: ExitStack
) -> list[float]:
    seconds = []
    for i in range(num_rounds):
        # New ones for each kill: after three within a minute a start waits.
        with ExitStack() as ending:
            listen = [f"unix:{folder}/{i}-{j}" for j in range(2)]
            ducks = _start(model_dir, listen, ending)
            ducks.keep()
            fleet = ending.enter_context(Fleet.connect(listen, recover_s=RECOVER_S))
            seconds.append(_from_the_kill(fleet, request, partial(_kill, ducks, 1)))
    return seconds


def _with_a_replica(
    model_dir: Path, folder: str, request: MoeRequest, num_rounds: int, stack: ExitStack
) -> list[float]:
    names = [[f"unix:{folder}/{i}-{j}" for j in range(2)] for i in range(2)]
    pair = [_start(model_dir, each, stack) for each in names]
    replicas = ["|".join(slices) for slices in zip(*names, strict=True)]
    fleet = stack.enter_context(Fleet.connect(replicas, recover_s=RECOVER_S))
    seconds = []
    for i in range(num_rounds):
        killed = i % 2
        kill = partial(_kill, pair[killed], 1)
        seconds.append(_from_the_kill(fleet, request, kill))
        # The other one is called now; this one is there for it when it is killed.
        spare = [f"unix:{folder}/spare{i}", names[killed][1]]
        pair[killed] = _start(model_dir, spare, stack)
        _kill(pair[killed], 0)
    return seconds


def _from_the_kill(
    fleet: Fleet, request: MoeRequest, kill: Callable[[], None]
) -> float:
    expected = _answer(fleet, request)
    begin_s = time.monotonic()
    kill()
    return _Waiting(fleet, request).end_s(expected) - begin_s


class _Waiting:
    """A call that is waited for in a thread."""

    def __init__(self, fleet: Fleet, request: MoeRequest) -> None:
        self._end_s = 0.0
        self._total: npt.NDArray[np.float32] | None = None
        self._thread = threading.Thread(target=self._wait, args=(fleet, request))
        self._thread.start()

    def end_s(self, expected: npt.NDArray[np.float32]) -> float:
        """When its answer came, which must be the expected one."""
        self._thread.join()
        np.testing.assert_array_equal(self._total, expected)
        return self._end_s

    def _wait(self, fleet: Fleet, request: MoeRequest) -> None:
        self._total = _answer(fleet, request)
        self._end_s = time.monotonic()


def _answer(fleet: Fleet, request: MoeRequest) -> npt.NDArray[np.float32]:
    return fleet.send(request).wait().total


def _start(model_dir: Path, listen: list[str], stack: ExitStack) -> LocalDucks:
    ducks = LocalDucks.start(model_dir, num_threads=1, listen=listen)
    return stack.enter_context(ducks)


def _kill(ducks: LocalDucks, index: int) -> None:
    os.kill(ducks.pids[index], signal.SIGKILL)


def _request(summary: ModelSummary) -> MoeRequest:
    draws = np.random.default_rng(SEED)
    hidden = draws.integers(0x3F00, 0x3F80, (NUM_ROWS, summary.hidden_size))
    all_experts = np.tile(np.arange(summary.n_routed_experts), (NUM_ROWS, 1))
    topk = draws.permuted(all_experts, axis=1)
    return MoeRequest(
        layer_idx=summary.layer_ids[0],
        hidden=hidden.astype(np.uint16),
        topk_ids=topk[:, :4].astype(np.int32),
        topk_weights=np.full((NUM_ROWS, 4), 0.25, np.float32),
    )


if __name__ == "__main__":
    main("reliability", run, __doc__)
