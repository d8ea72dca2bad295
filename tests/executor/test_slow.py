"""A slow duck is named by its calls, against those of its peers."""

import contextlib
import time

import numpy as np
import pytest

from testing.ducks.mini_model import make_info, make_request
from testing.ducks.wire_peers import BOTH_CLIENTS, calling, check_echo, echo, serving
from testing.waiting import WAIT_S, wait_until
from vllm_duck.executor.duck import DuckStatistics
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.slow import MIN_CALLS, SlowLog, slow_ducks


def _statistics(*rtt_ms):
    """Ducks whose calls all took that long."""
    return [
        DuckStatistics.of(
            f"d{i}",
            MIN_CALLS,
            np.full((MIN_CALLS, 3), round(1000 * each), np.uint32),
        )
        for i, each in enumerate(rtt_ms)
    ]


@pytest.mark.parametrize(
    ("rtt_ms", "slow"),
    [
        ((2, 2, 6), ["d2"]),
        ((2, 2, 5.9), []),
        ((2, 9), ["d1"]),
        # Another duck that is slow hides none.
        ((2, 9, 2, 8), ["d1", "d3"]),
        # Three times as long, and nobody would notice.
        ((0.1, 0.1, 0.9), []),
        # Without peers there is nothing to compare.
        ((50,), []),
        ((), []),
    ],
    ids=str,
)
def test_three_times_the_median_of_the_others_is_slow(rtt_ms, slow):
    assert [each.name for each in slow_ducks(_statistics(*rtt_ms))] == slow


def test_one_call_in_a_hundred_counts_and_fewer_do_not():
    def named(num_slow):
        latest = np.full((1000, 3), 1000, np.uint32)
        latest[:num_slow] = 30_000
        peer, other = _statistics(1, 1)
        duck = DuckStatistics.of("d9", len(latest), latest)
        return [each.name for each in slow_ducks([peer, duck, other])]

    assert named(5) == []
    assert named(15) == ["d9"]


def test_few_calls_say_nothing():
    latest = np.full((MIN_CALLS - 1, 3), 30_000, np.uint32)
    duck = DuckStatistics.of("d9", len(latest), latest)
    assert slow_ducks([*_statistics(1, 1), duck]) == []


def test_the_log_has_a_line_when_it_begins_and_one_when_it_ends(caplog):
    log = SlowLog()
    named = [log.look(_statistics(2, 2, each)) for each in (2, 7, 8, 5, 4.1, 3.9, 2, 7)]
    assert [set(each) for each in named] == [
        *(set(), {"d2"}, {"d2"}, {"d2"}, {"d2"}, set(), set(), {"d2"})
    ]
    assert [record.message for record in caplog.records] == [
        "duck d2 is slow: 1 % of its latest calls take 7.0 ms or more, its peers' 2.0 "
        "ms",
        "duck d2 is as quick as its peers again",
        "duck d2 is slow: 1 % of its latest calls take 7.0 ms or more, its peers' 2.0 "
        "ms",
    ]


class _Sleeping(DuckServer):
    """An echo that takes its time."""

    def __init__(self):
        super().__init__(self._echo, make_info(), listen="127.0.0.1:0")
        self.sleep_s = 0.005

    def _echo(self, request, reply_dtype):
        time.sleep(self.sleep_s)
        return echo(request, reply_dtype)


@pytest.fixture
def sleeping_duck():
    server = _Sleeping()
    server.start()
    yield server
    server.stop(0)


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_duck_that_sleeps_is_named(client, sleeping_duck):
    """However slow the machine is: it sleeps four times as long as its peers take."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(serving("grpcio")).endpoint for _ in range(2)]
        endpoints = [peers[0], sleeping_duck.endpoint, peers[1]]
        fan_out = stack.enter_context(calling(client, endpoints))

        def is_named():
            fan_out.send(make_request()).wait()
            first, _, last = statistics = fan_out.statistics()
            sleeping_duck.sleep_s = max(
                sleeping_duck.sleep_s, 4e-6 * max(first.rtt_p99_us, last.rtt_p99_us)
            )
            slow = slow_ducks(statistics, min_calls=20)
            return [each.name for each in slow] == [sleeping_duck.endpoint]

        wait_until(is_named)


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_round_trip_does_not_count_the_wait_for_a_lost_duck(client, tmp_path):
    listen = f"unix:{tmp_path}/duck"
    with contextlib.ExitStack() as later:
        with serving("grpcio", listen=listen):
            fan_out = later.enter_context(calling(client, [listen], recover_s=WAIT_S))
            check_echo(fan_out, make_request())
        pending = fan_out.send(make_request())
        assert not pending.is_done()
        # It is sent again behind this.
        begin_s = time.monotonic()
        later.enter_context(serving("grpcio", listen=listen))
        times = pending.wait().times
        assert times.rtt_us <= (time.monotonic() - begin_s) * 1e6
