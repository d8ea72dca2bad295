"""Hosts that share a duck: turns by rows, and long calls that give way."""

import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from testing.compiled import run_checks
from testing.ducks.mini_model import WHOLE, make_mini_model, make_request
from testing.ducks.wire_peers import needs_native
from testing.waiting import WAIT_S
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.native.client import NativeFanOut
from vllm_duck.executor.native.server import NativeDuckServer
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.security import ClientSecurity

pytestmark = needs_native


def test_hosts_take_turns_by_rows(tmp_path):
    checks = Path(__file__).with_name("turns_checks.cpp")
    assert run_checks(checks, tmp_path) == "ok"


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    checkpoint = Checkpoint(make_mini_model().write(tmp_path_factory.mktemp("model")))
    loaded = load_shard(checkpoint, WHOLE, show_progress=False)
    return ShardMoe(loaded, MoeKernel(num_threads=2))


@pytest.fixture(scope="module")
def new_host(moe):
    """Connects another host to the duck."""
    server = NativeDuckServer(moe.native_compute(), moe.info, listen="127.0.0.1:0")
    server.start()

    def connect():
        return NativeFanOut(
            [server.endpoint],
            identities=[identity_of(moe.info)],
            deadline_s=WAIT_S,
            reply_dtype="bf16",
            security=ClientSecurity(),
        )

    yield connect
    server.stop(0)


def _totals(moe, requests):
    """What each request gives, alone."""
    return [bf16_to_f32(moe(request, "bf16")) for request in requests]


def test_a_long_call_lets_another_host_s_short_ones_pass(moe, new_host):
    """A hundred thousand rows, of which two thousand are computed at a time."""
    long, short = make_request(100_000, seed=1), make_request(2, seed=2)
    expected_long, expected_short = _totals(moe, [long, short])
    num_passed = 0
    with closing(new_host()) as prefilling, closing(new_host()) as decoding:
        decoding.send(short).wait()
        pending = prefilling.send(long)
        while not pending.is_done():
            np.testing.assert_array_equal(
                decoding.send(short).wait().total, expected_short
            )
            num_passed += not pending.is_done()
        np.testing.assert_array_equal(pending.wait().total, expected_long)
    assert num_passed > 1


def test_calls_of_many_hosts_at_once_have_the_bits_of_each_alone(moe, new_host):
    sizes = ([1, 2, 64, 3], [65, 300, 1], [2500, 2, 5000])
    plans = [[make_request(n, seed=n) for n in each] * 8 for each in sizes]
    expected = [_totals(moe, plan) for plan in plans]
    differing = []

    def compute(plan, totals):
        with closing(new_host()) as host:
            pending = [host.send(request) for request in plan]
            for waiting, total in zip(pending, totals, strict=True):
                if not np.array_equal(waiting.wait().total, total):
                    differing.append(len(total))

    threads = [
        threading.Thread(target=compute, args=each)
        for each in zip(plans, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not differing
