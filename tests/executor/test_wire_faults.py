"""A fault on the wire is a named error within the deadline, or the right bits after a
second try; never a wrong sum, never a hang."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest

from tests.executor.meddler import Meddler, flip
from tests.executor.mini_model import make_request
from tests.executor.wire_peers import NATIVE, SERVERS, calling, echo, serving
from vllm_duck.errors import (
    DuckProtocolError,
    DuckShapeError,
    DuckTimeout,
    DuckTransportError,
    DuckUnavailable,
)
from vllm_duck.executor import codec
from vllm_duck.executor.bf16 import bf16_to_f32
from vllm_duck.executor.wire import SERVICE

BOTH_CLIENTS = [NATIVE, "grpcio"]


@pytest.fixture(params=SERVERS)
def meddler(request):
    with serving(request.param) as server:
        proxy = Meddler(server.endpoint)
        yield proxy
        proxy.close()


def _check(fan_out, request):
    expected = bf16_to_f32(request.hidden)
    np.testing.assert_array_equal(fan_out.start(request).result(), expected)


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_reply_that_never_comes_is_a_timeout_and_later_calls_go_on(meddler, client):
    with calling(client, [meddler.endpoint], deadline_s=0.3) as fan_out:
        _check(fan_out, make_request())
        meddler.hold()
        late = fan_out.start(make_request(seed=1))
        with pytest.raises(DuckTimeout, match="did not answer within deadline_s=0.3"):
            late.result()
        meddler.resume()
        # The late reply may come first; it belongs to nobody.
        for seed in range(2, 5):
            _check(fan_out, make_request(seed=seed))


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_late_reply_may_be_larger_than_what_is_in_flight(meddler, client):
    with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
        _check(fan_out, make_request())
        meddler.passes_to_host.clear()
        late = fan_out.start(make_request(60, hidden_size=7168))
        with pytest.raises(DuckTimeout):
            late.result()
        del late
        request = make_request(seed=1)
        pending = fan_out.start(request)
        meddler.resume()
        np.testing.assert_array_equal(pending.result(), bf16_to_f32(request.hidden))


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_reply_in_time_counts_however_late_it_is_looked_at(
    meddler, client, is_connected
):
    """The host may be busy for longer than the deadline."""
    with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
        if is_connected:
            _check(fan_out, make_request())
            request = make_request(seed=1)
            pending = fan_out.start(request)
            time.sleep(0.8)
            expected = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.result(), expected)
        else:
            pending = fan_out.start(make_request())
            time.sleep(0.2)
            pending.result()


@pytest.mark.parametrize("client", [NATIVE])
def test_requests_in_flight_survive_a_broken_connection(meddler, client):
    with calling(client, [meddler.endpoint] * 2) as fan_out:
        fan_out.start(make_request()).result()
        meddler.passes_to_host.clear()
        requests = [make_request(seed=seed) for seed in range(2)]
        pendings = [fan_out.start(request) for request in requests]
        meddler.cut()
        meddler.resume()
        for request, pending in zip(requests, pendings, strict=True):
            x = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.result(), x + x)


@pytest.mark.parametrize("client", [NATIVE])
def test_a_connection_that_breaks_again_and_again_is_unavailable(meddler, client):
    meddler.to_host = lambda chunk, before: meddler.cut() or b""
    with calling(client, [meddler.endpoint]) as fan_out:
        with pytest.raises(DuckUnavailable, match=f"duck {meddler.endpoint} .*closed"):
            fan_out.start(make_request()).result()
        assert meddler.num_connections == 3
        meddler.to_host = lambda chunk, before: chunk
        _check(fan_out, make_request())


@pytest.mark.parametrize("client", [NATIVE])
def test_a_connection_that_broke_between_calls_is_replaced(meddler, client):
    with calling(client, [meddler.endpoint]) as fan_out:
        for seed in range(3):
            _check(fan_out, make_request(seed=seed))
            meddler.cut()


@pytest.mark.parametrize("client", [NATIVE])
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_a_message_that_is_damaged_once_is_sent_again(meddler, client, direction):
    # Far behind the head of the only message.
    setattr(meddler, direction, flip(5000))
    with calling(client, [meddler.endpoint]) as fan_out:
        _check(fan_out, make_request(1, hidden_size=7168))
    assert meddler.num_connections == 2


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_a_wire_that_damages_everything_is_a_named_error(meddler, client, direction):
    setattr(meddler, direction, flip(5000, times=99))
    with calling(client, [meddler.endpoint]) as fan_out:
        pending = fan_out.start(make_request(1, hidden_size=7168))
        with pytest.raises(DuckProtocolError, match="checksum|damaged"):
            pending.result()


@pytest.mark.parametrize("client", [NATIVE])
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_one_damaged_byte_anywhere_never_gives_a_wrong_sum(meddler, client, direction):
    request = make_request(1, hidden_size=128)
    # 500 bytes each way: preface, settings, headers, the message.
    for position in range(0, 600, 7):
        setattr(meddler, direction, flip(position))
        with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
            try:
                got = fan_out.start(request).result()
            except (DuckTransportError, DuckShapeError):
                continue
            np.testing.assert_array_equal(got, bf16_to_f32(request.hidden))


@pytest.mark.parametrize("client", [NATIVE])
def test_a_duck_that_takes_no_bytes_is_a_timeout_and_gets_a_new_connection(
    meddler, client
):
    with calling(client, [meddler.endpoint], deadline_s=0.5) as fan_out:
        _check(fan_out, make_request())
        meddler.hold()
        stuck = fan_out.start(make_request(2100, hidden_size=7168))
        with pytest.raises(DuckTimeout):
            stuck.result()
        del stuck
        meddler.resume()
        _check(fan_out, make_request())
    assert meddler.num_connections == 2


@pytest.mark.parametrize("client", [NATIVE])
def test_a_connection_that_went_silent_is_pinged_and_replaced(meddler, client):
    from vllm_duck.executor.native_client import NativeFanOut
    from vllm_duck.executor.security import ClientSecurity

    fan_out = NativeFanOut(
        [meddler.endpoint],
        deadline_s=30,
        reply_dtype="bf16",
        security=ClientSecurity(),
        quiet_s=0.2,
    )
    _check(fan_out, make_request())
    # From here on the connection swallows what is sent; a new one takes one chunk.
    meddler.to_duck = lambda chunk, before: b"" if before else chunk
    request = make_request(seed=1)
    pending = fan_out.start(request)
    np.testing.assert_array_equal(pending.result(), bf16_to_f32(request.hidden))
    assert meddler.num_connections == 2
    fan_out.close()


_DUCK = """
import signal, sys
from tests.executor.wire_peers import serving
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
        with calling(client, [endpoint], deadline_s=60) as fan_out:
            _check(fan_out, make_request())
            os.kill(process.pid, signal.SIGSTOP)
            # It may run on for a moment, and a moment is enough to answer.
            os.waitpid(process.pid, os.WUNTRACED)
            pending = fan_out.start(make_request())
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with pytest.raises(DuckUnavailable, match=f"duck {endpoint}"):
                pending.result()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def stock_server():
    """Starts plain grpcio servers whose Forward is the given function."""
    servers = []

    def start(forward, **options):
        server = grpc.server(
            futures.ThreadPoolExecutor(8),
            options=list(options.pop("options", [])),
            **options,
        )
        handler = grpc.stream_stream_rpc_method_handler(forward)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Forward": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0)


def _answer(message):
    decoded = codec.decode_request(message)
    partial = echo(decoded.request, decoded.reply_dtype)
    return codec.encode_reply(
        partial, request_id=decoded.request_id, queue_us=0, compute_us=0
    )


def _echo_all(messages, context):
    return map(_answer, messages)


@pytest.mark.parametrize("client", [NATIVE])
def test_connections_that_a_server_ends_for_their_age_are_replaced(
    stock_server, client
):
    endpoint = stock_server(
        _echo_all,
        options=[
            ("grpc.max_connection_age_ms", 100),
            ("grpc.max_connection_age_grace_ms", 100),
        ],
    )
    with calling(client, [endpoint]) as fan_out:
        stop = threading.Event()
        timer = threading.Timer(1.5, stop.set)
        timer.start()
        seed = 0
        while not stop.is_set():
            seed += 1
            requests = [make_request(seed=2 * seed + i) for i in range(2)]
            pendings = [fan_out.start(request) for request in requests]
            for request, pending in zip(requests, pendings, strict=True):
                np.testing.assert_array_equal(
                    pending.result(), bf16_to_f32(request.hidden)
                )


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, DuckProtocolError, "--max-message-mib"),
        (grpc.StatusCode.UNIMPLEMENTED, DuckProtocolError, "is not a duck"),
        (grpc.StatusCode.UNAUTHENTICATED, DuckProtocolError, "refused the token"),
        (grpc.StatusCode.INVALID_ARGUMENT, DuckProtocolError, "refused a message"),
        (grpc.StatusCode.DATA_LOSS, DuckProtocolError, "got a damaged message"),
        (grpc.StatusCode.UNAVAILABLE, DuckUnavailable, "cannot be reached or went"),
        (grpc.StatusCode.INTERNAL, DuckProtocolError, "did not answer as a duck"),
    ],
)
def test_the_status_that_ends_a_stream_is_named_with_its_text(
    stock_server, client, code, error, match
):
    def abort(messages, context):
        next(messages)
        context.abort(code, "because: 100% of é")

    with calling(client, [stock_server(abort)]) as fan_out:
        pending = fan_out.start(make_request())
        with pytest.raises(error, match=f"{match}.*{code.name}: because: 100% of é"):
            pending.result()


@pytest.mark.parametrize("client", [NATIVE])
def test_compressed_replies_are_refused_by_name(stock_server, client):
    endpoint = stock_server(_echo_all, compression=grpc.Compression.Gzip)
    with calling(client, [endpoint]) as fan_out:
        pending = fan_out.start(make_request(64, hidden_size=512))
        with pytest.raises(DuckProtocolError, match="compress"):
            pending.result()


@pytest.mark.parametrize("client", [NATIVE])
def test_a_reply_of_another_shape_is_a_protocol_error(stock_server, client):
    def smaller(messages, context):
        for message in messages:
            decoded = codec.decode_request(message)
            partial = echo(decoded.request, decoded.reply_dtype)[:1]
            yield codec.encode_reply(
                partial, request_id=decoded.request_id, queue_us=0, compute_us=0
            )

    with calling(client, [stock_server(smaller)]) as fan_out:
        match = r"expected a partial sum of shape \[3, 32\] in 192 bytes, got \[1, 32\]"
        with pytest.raises(DuckProtocolError, match=match):
            fan_out.start(make_request()).result()


@pytest.mark.parametrize("client", [NATIVE])
def test_a_reply_larger_than_any_that_is_owed_is_refused_before_it_is_read(
    stock_server, client
):
    def flood(messages, context):
        next(messages)
        yield bytes(200_000_000)

    with calling(client, [stock_server(flood)]) as fan_out:
        match = "expected a reply of at most .* bytes, got one of 200000000"
        with pytest.raises(DuckProtocolError, match=match):
            fan_out.start(make_request()).result()


@pytest.mark.parametrize("client", [NATIVE])
def test_replies_to_nobody_are_dropped(stock_server, client):
    def twice(messages, context):
        for message in messages:
            yield _answer(message)
            yield _answer(message)

    with calling(client, [stock_server(twice)]) as fan_out:
        for seed in range(20):
            _check(fan_out, make_request(seed=seed))


@pytest.mark.parametrize("client", [NATIVE])
def test_two_threads_share_a_fan_out(meddler, client):
    errors = []

    def call(thread):
        try:
            for seed in range(50):
                _check(fan_out, make_request(seed=100 * thread + seed))
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
        pendings = [fan_out.start(make_request()) for _ in range(64)]
        with pytest.raises(DuckProtocolError, match="at most 64 requests"):
            fan_out.start(make_request())
        del pendings
        _check(fan_out, make_request())


@pytest.mark.parametrize("client", [NATIVE])
def test_closing_the_client_fails_what_is_in_flight(meddler, client):
    meddler.passes_to_host.clear()
    with calling(client, [meddler.endpoint]) as fan_out:
        pending = fan_out.start(make_request())
        fan_out.close()
        with pytest.raises(DuckUnavailable, match="the client was closed"):
            pending.result()
        with pytest.raises(DuckUnavailable, match="the client was closed"):
            fan_out.start(make_request()).result()
