"""A fault on the wire is a named error within the deadline, or the right bits after a
second try; never a wrong sum, never a hang."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from testing.ducks.meddler import Meddler, flip
from testing.ducks.mini_model import make_info, make_request
from testing.ducks.wire_peers import (
    BOTH_CLIENTS,
    NATIVE,
    SERVERS,
    calling,
    check_echo,
    check_echo_in_the_end,
    serving,
)
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import (
    DuckProtocolError,
    DuckShapeError,
    DuckTimeout,
    DuckTransportError,
    DuckUnavailable,
)
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.identity import identity_of

# What make_request() is answered has more: three rows of 32 values.
REPLY_BYTES = 3 * 2 * 32


@pytest.fixture(params=SERVERS)
def meddler(request):
    with serving(request.param) as server:
        proxy = Meddler(server.endpoint)
        yield proxy
        proxy.close()


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_reply_that_never_comes_is_a_timeout_and_later_calls_go_on(meddler, client):
    with calling(client, [meddler.endpoint], deadline_s=0.3) as fan_out:
        check_echo_in_the_end(fan_out, make_request())
        meddler.hold()
        late = fan_out.send(make_request(seed=1))
        with pytest.raises(DuckTimeout, match="did not answer within deadline_s=0.3"):
            late.wait()
        meddler.resume()
        # The late reply may come first; it belongs to nobody.
        for seed in range(2, 5):
            check_echo_in_the_end(fan_out, make_request(seed=seed))


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_late_reply_may_be_larger_than_what_is_in_flight(meddler, client):
    with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
        check_echo_in_the_end(fan_out, make_request())
        meddler.passes_to_host.clear()
        late = fan_out.send(make_request(60, hidden_size=7168))
        with pytest.raises(DuckTimeout):
            late.wait()
        del late
        request = make_request(seed=1)
        pending = fan_out.send(request)
        meddler.resume()
        try:
            total = pending.wait().total
        except DuckTimeout:  # a slow machine: the late reply has still been dropped
            return check_echo_in_the_end(fan_out, request)
        np.testing.assert_array_equal(total, bf16_to_f32(request.hidden))


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_reply_in_time_counts_however_late_it_is_looked_at(meddler, client):
    """The host may be busy for longer than the deadline."""
    deadline_s = 2.0
    with calling(client, [meddler.endpoint], deadline_s=deadline_s) as fan_out:
        check_echo_in_the_end(fan_out, make_request())
        request = make_request(seed=1)
        is_in_time = False
        while not is_in_time:
            answered = meddler.num_passed["host"] + REPLY_BYTES
            begin_s = time.monotonic()
            pending = fan_out.send(request)
            wait_until(lambda end=answered: meddler.num_passed["host"] > end)
            is_in_time = time.monotonic() < begin_s + deadline_s - 0.1
        time.sleep(begin_s + deadline_s + 0.3 - time.monotonic())
        np.testing.assert_array_equal(pending.wait().total, bf16_to_f32(request.hidden))


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_call_before_there_is_a_connection_may_be_looked_at_late(meddler, client):
    with calling(client, [meddler.endpoint]) as fan_out:
        pending = fan_out.send(make_request())
        time.sleep(0.5)
        pending.wait()


@pytest.mark.parametrize("client", [NATIVE])
def test_requests_in_flight_survive_a_broken_connection(meddler, client):
    with calling(client, [meddler.endpoint] * 2) as fan_out:
        fan_out.send(make_request()).wait()
        meddler.passes_to_host.clear()
        requests = [make_request(seed=seed) for seed in range(2)]
        pendings = [fan_out.send(request) for request in requests]
        meddler.cut()
        meddler.resume()
        for request, pending in zip(requests, pendings, strict=True):
            x = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.wait().total, x + x)


@pytest.mark.parametrize("client", [NATIVE])
def test_a_connection_that_breaks_again_and_again_is_unavailable(meddler, client):
    meddler.to_host = lambda chunk, before: meddler.cut() or b""
    with calling(client, [meddler.endpoint]) as fan_out:
        with pytest.raises(DuckUnavailable, match=f"duck {meddler.endpoint} .*closed"):
            fan_out.send(make_request()).wait()
        assert meddler.num_connections == 3
        meddler.to_host = lambda chunk, before: chunk
        check_echo(fan_out, make_request())


@pytest.mark.parametrize("client", [NATIVE])
def test_a_connection_that_broke_between_calls_is_replaced(meddler, client):
    with calling(client, [meddler.endpoint]) as fan_out:
        for seed in range(3):
            check_echo(fan_out, make_request(seed=seed))
            meddler.cut()


@pytest.mark.parametrize("client", [NATIVE])
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_a_message_that_is_damaged_once_is_sent_again(meddler, client, direction):
    # Far behind the head of the only message.
    setattr(meddler, direction, flip(5000))
    with calling(client, [meddler.endpoint]) as fan_out:
        check_echo(fan_out, make_request(1, hidden_size=7168))
    assert meddler.num_connections == 2


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_a_wire_that_damages_everything_is_a_named_error(meddler, client, direction):
    setattr(meddler, direction, flip(5000, times=99))
    with calling(client, [meddler.endpoint]) as fan_out:
        pending = fan_out.send(make_request(1, hidden_size=7168))
        with pytest.raises(DuckProtocolError, match="checksum|damaged"):
            pending.wait()


@pytest.mark.parametrize("client", [NATIVE])
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_one_damaged_byte_anywhere_never_gives_a_wrong_sum(meddler, client, direction):
    request = make_request(1, hidden_size=128)
    # 500 bytes each way: preface, settings, headers, the message.
    for position in range(0, 600, 7):
        setattr(meddler, direction, flip(position))
        with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
            try:
                got = fan_out.send(request).wait().total
            except (DuckTransportError, DuckShapeError):
                continue
            np.testing.assert_array_equal(got, bf16_to_f32(request.hidden))


@pytest.mark.parametrize("client", [NATIVE])
def test_a_duck_that_takes_no_bytes_is_a_timeout_and_gets_a_new_connection(
    meddler, client
):
    with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
        check_echo_in_the_end(fan_out, make_request())
        before = meddler.num_connections
        meddler.hold()
        stuck = fan_out.send(make_request(2100, hidden_size=7168))
        with pytest.raises(DuckTimeout):
            stuck.wait()
        del stuck
        meddler.resume()
        check_echo_in_the_end(fan_out, make_request())
    assert meddler.num_connections > before


@pytest.mark.parametrize("client", [NATIVE])
def test_a_connection_that_went_silent_is_pinged_and_replaced(meddler, client):
    from vllm_duck.executor.native.client import NativeFanOut
    from vllm_duck.executor.wire.security import ClientSecurity

    fan_out = NativeFanOut(
        [meddler.endpoint],
        identities=[identity_of(make_info())],
        deadline_s=WAIT_S,
        reply_dtype="bf16",
        security=ClientSecurity(),
        quiet_s=1.0,
    )
    check_echo(fan_out, make_request())
    # This connection swallows from here on what is sent; a new one passes it.
    silent = meddler.num_connections
    meddler.to_duck = lambda chunk, before: (
        b"" if meddler.num_connections == silent else chunk
    )
    check_echo(fan_out, make_request(seed=1))
    assert meddler.num_connections > silent
    fan_out.close()


_DUCK = """
import signal, sys
from testing.ducks.wire_peers import serving
with serving(sys.argv[1]) as server:
    print(server.endpoint, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize("server", SERVERS)
def test_a_duck_that_is_killed_in_mid_call_is_unavailable_at_once(client, server):
    process = subprocess.Popen(
        [sys.executable, "-c", _DUCK, server], stdout=subprocess.PIPE, text=True
    )
    endpoint = process.stdout.readline().strip()
    try:
        with calling(client, [endpoint]) as fan_out:
            check_echo(fan_out, make_request())
            os.kill(process.pid, signal.SIGSTOP)
            # It may run on for a moment, and a moment is enough to answer.
            os.waitpid(process.pid, os.WUNTRACED)
            pending = fan_out.send(make_request())
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with pytest.raises(DuckUnavailable, match=f"duck {endpoint}"):
                pending.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("client", [NATIVE])
def test_two_threads_share_a_fan_out(meddler, client):
    errors = []

    def call(thread):
        try:
            for seed in range(50):
                check_echo(fan_out, make_request(seed=100 * thread + seed))
        except Exception as error:
            errors.append(error)

    with calling(client, [meddler.endpoint]) as fan_out:
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.parametrize("client", [NATIVE])
def test_a_request_beyond_the_number_in_flight_is_refused(client):
    with serving("native") as server, calling(client, [server.endpoint]) as fan_out:
        pendings = [fan_out.send(make_request()) for _ in range(64)]
        with pytest.raises(DuckProtocolError, match="at most 64 requests"):
            fan_out.send(make_request())
        del pendings
        check_echo(fan_out, make_request())


@pytest.mark.parametrize("client", [NATIVE])
def test_closing_the_client_fails_what_is_in_flight(meddler, client):
    meddler.passes_to_host.clear()
    with calling(client, [meddler.endpoint]) as fan_out:
        pending = fan_out.send(make_request())
        fan_out.close()
        with pytest.raises(DuckUnavailable, match="the client was closed"):
            pending.wait()
        with pytest.raises(DuckUnavailable, match="the client was closed"):
            fan_out.send(make_request()).wait()
