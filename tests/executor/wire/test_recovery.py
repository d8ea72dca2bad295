"""A duck that is lost or late is waited for, and the calls in flight are sent again:
the right bits in the end, or an error that names the duck and the knob."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from testing.ducks.meddler import Meddler, flip
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import (
    BOTH_CLIENTS,
    SERVERS,
    calling,
    check_echo,
    serving,
)
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckProtocolError, DuckTimeout, DuckUnavailable
from vllm_duck.executor.wire import recovery
from vllm_duck.executor.wire.bf16 import bf16_to_f32

pytestmark = pytest.mark.parametrize("client", BOTH_CLIENTS)


@pytest.fixture(params=SERVERS)
def server_kind(request):
    return request.param


@pytest.fixture
def listen(tmp_path):
    return f"unix:{tmp_path}/duck"


@pytest.fixture
def meddler(server_kind):
    with serving(server_kind) as server:
        proxy = Meddler(server.endpoint)
        yield proxy
        proxy.close()


@contextlib.contextmanager
def _waiting_for(pendings):
    """A thread that waits for these calls, and holds their sums or what failed."""
    got = []

    def wait():
        for pending in pendings:
            try:
                got.append(pending.wait().total)
            except Exception as error:
                got.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    yield got
    thread.join()


def test_calls_in_flight_are_answered_by_the_duck_that_comes_back(
    client, server_kind, listen, caplog
):
    requests = [make_request(seed=seed) for seed in range(3)]
    with contextlib.ExitStack() as later:
        with serving(server_kind, listen=listen):
            fan_out = later.enter_context(calling(client, [listen], recover_s=WAIT_S))
            check_echo(fan_out, make_request())
        pendings = [fan_out.send(request) for request in requests]
        with _waiting_for(pendings) as got:
            wait_until(lambda: "is lost" in caplog.text)
            later.enter_context(serving(server_kind, listen=listen))
        for request, total in zip(requests, got, strict=True):
            np.testing.assert_array_equal(total, bf16_to_f32(request.hidden))
        lines = [each.message for each in caplog.records]
    assert sum(f"duck {listen} is lost (" in line for line in lines) == 1
    assert sum(f"duck {listen} is back after " in line for line in lines) == 1


def test_the_first_call_waits_for_a_duck_too(client, server_kind, listen):
    with calling(client, [listen], recover_s=WAIT_S) as fan_out:
        request = make_request()
        with (
            _waiting_for([fan_out.send(request)]) as got,
            serving(server_kind, listen=listen),
        ):
            wait_until(lambda: got)
        np.testing.assert_array_equal(got[0], bf16_to_f32(request.hidden))


def test_a_late_duck_gets_a_new_connection_and_the_call_again(client, meddler):
    with calling(client, [meddler.endpoint], deadline_s=1.0, recover_s=WAIT_S) as each:
        late = meddler.num_connections + 1
        # This connection swallows what is answered; later ones pass it.
        meddler.to_host = lambda chunk, before: (
            b"" if meddler.num_connections <= late and before > 300 else chunk
        )
        check_echo(each, make_request())
        for seed in range(3):
            check_echo(each, make_request(seed=seed))


def test_past_recover_s_the_error_names_duck_seconds_reason_and_knob(client, listen):
    match = (
        rf"duck {listen} has been lost for \d+\.\d s with recover_s=0.3 \(.*No such "
        r"file.*\); start it again, or raise recover_s"
    )
    with calling(client, [listen], recover_s=0.3) as fan_out:
        for _ in range(2):
            with pytest.raises(DuckUnavailable, match=match):
                fan_out.send(make_request()).wait()


def test_after_giving_up_the_duck_is_found_when_it_is_back(client, server_kind, listen):
    with calling(client, [listen], recover_s=0.1) as fan_out:
        with pytest.raises(DuckUnavailable):
            fan_out.send(make_request()).wait()
        with serving(server_kind, listen=listen):

            def is_answered():
                try:
                    check_echo(fan_out, make_request())
                except DuckUnavailable:  # a slow machine
                    return False
                return True

            wait_until(is_answered)


def test_a_duck_that_connects_and_says_nothing_is_given_up(client, meddler):
    meddler.hold()
    with calling(client, [meddler.endpoint], deadline_s=0.2, recover_s=0.5) as fan_out:
        match = r"has been lost for .* with recover_s=0.5 \(.*deadline_s"
        with pytest.raises(DuckUnavailable, match=match):
            fan_out.send(make_request()).wait()


def test_a_step_that_must_end_gives_up_before_recover_s(client, listen):
    with calling(client, [listen], recover_s=WAIT_S) as fan_out:
        fan_out.begin_step(0.2)
        for _ in range(2):
            with pytest.raises(DuckUnavailable, match="has been lost for"):
                fan_out.send(make_request()).wait()


def test_a_call_that_kills_each_duck_that_gets_it_is_not_sent_for_ever(client, meddler):
    # Far behind the headers with which a duck proves itself.
    meddler.to_duck = lambda chunk, before: (
        meddler.cut() or b"" if before + len(chunk) > 2000 else chunk
    )
    with calling(client, [meddler.endpoint], recover_s=WAIT_S) as fan_out:
        with pytest.raises(DuckUnavailable):
            fan_out.send(make_request(1, hidden_size=7168)).wait()
        # A cut also breaks what has just been connected, and was sent nothing yet.
        assert recovery.MAX_SENDS <= meddler.num_connections < 3 * recovery.MAX_SENDS
        meddler.to_duck = lambda chunk, before: chunk
        check_echo(fan_out, make_request())


def test_a_duck_that_is_always_late_is_a_timeout(client, meddler):
    held = threading.Event()
    meddler.to_host = lambda chunk, before: (
        held.wait(WAIT_S) and b"" if before + len(chunk) > 2000 else chunk
    )
    with calling(client, [meddler.endpoint], deadline_s=1.0, recover_s=WAIT_S) as each:
        with pytest.raises(DuckTimeout, match=r"deadline_s=1\.0; raise deadline_s"):
            each.send(make_request(1, hidden_size=7168)).wait()
        held.set()


def test_a_wire_that_damages_everything_is_no_endless_recovery(client, meddler):
    meddler.to_host = flip(5000, times=99)
    with (
        calling(client, [meddler.endpoint], recover_s=WAIT_S) as fan_out,
        pytest.raises(DuckProtocolError, match="checksum|damaged"),
    ):
        fan_out.send(make_request(1, hidden_size=7168)).wait()


# In a DATA frame: gRPC's flag and length, and the message's first fields.
@pytest.mark.parametrize("at", [9, 10, 12, 13, 14, 16, 40])
def test_a_request_that_is_damaged_anywhere_is_sent_again(client, meddler, at):
    requests = [make_request(seed=seed) for seed in range(4)]
    # Of a longer message the duck waits for the rest.
    patience = {"deadline_s": 2.0, "recover_s": WAIT_S}
    with calling(client, [meddler.endpoint], **patience) as fan_out:
        check_echo(fan_out, requests[0])

        def damage(chunk, _):
            if len(chunk) <= 100:
                return chunk
            meddler.to_duck = lambda chunk, _: chunk
            return chunk[:at] + bytes([chunk[at] ^ 1]) + chunk[at + 1 :]

        meddler.to_duck = damage
        for request, pending in [(each, fan_out.send(each)) for each in requests]:
            expected = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.wait().total, expected)
        assert meddler.to_duck is not damage


def test_closing_the_client_ends_the_wait(client, listen, caplog):
    with contextlib.ExitStack() as stack:
        fan_out = stack.enter_context(calling(client, [listen], recover_s=WAIT_S))
        with _waiting_for([fan_out.send(make_request())]) as got:
            wait_until(lambda: "is lost" in caplog.text)
            stack.close()
    assert "the client was closed" in str(got[0])


def test_a_call_that_is_dropped_during_the_wait_leaves_the_next_one_well(
    client, server_kind, listen
):
    with calling(client, [listen], recover_s=WAIT_S) as fan_out:
        dropped = fan_out.send(make_request())
        assert not dropped.is_done()
        del dropped
        with serving(server_kind, listen=listen):
            check_echo(fan_out, make_request(seed=1))


_HOST = """
import signal, sys
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with calling(sys.argv[1], [sys.argv[2]], recover_s=900) as fan_out:
    pending = fan_out.send(make_request())
    print("waiting", flush=True)
    pending.wait()
"""


def test_a_signal_does_not_wait_for_the_duck(client, listen):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOST, client, listen],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 7


def test_tries_are_few(client, meddler):
    """However slow the machine is: a busy loop makes thousands in a second."""
    meddler.to_duck = lambda chunk, before: meddler.cut() or b""
    with (
        calling(client, [meddler.endpoint], recover_s=1.0) as fan_out,
        pytest.raises(DuckUnavailable, match="has been lost for"),
    ):
        fan_out.send(make_request()).wait()
    # At once, and after 0.05, 0.1, 0.2, 0.4 and 0.8 s; grpcio dials twice.
    assert 2 <= meddler.num_connections <= 14


def test_log_lines_are_few(client, caplog):
    now = [100.0]
    log = recovery.RecoveryLog(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            log.lost("a", "reset", 60)
            log.back("a", 0.1)
            now[0] += 0.1
        log.lost("b", "reset", 60)
        now[0] += 60
        log.lost("a", "reset", 60)
    lines = [record.message for record in caplog.records]
    assert [line.split(" (")[0] for line in lines] == [
        "duck a is lost",
        "duck a is back after 0.1 s",
        "duck b is lost",
        "duck a is lost",
    ]
    assert "was 49 times more since the last such line" in lines[-1]
