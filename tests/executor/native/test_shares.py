"""Hosts of one address, whatever they do, leave hosts elsewhere theirs of a duck."""

import socket
import threading
from contextlib import ExitStack, closing, contextmanager

import grpc
import pytest

from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import encode_long_request, make_request
from testing.ducks.wire_peers import calling, check_echo, needs_native, serving
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckProtocolError, DuckUnavailable
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.limits import FORWARD_METHOD

pytestmark = needs_native

MAX_CALLS_OF_A_CONNECTION, MAX_CALLS_OF_AN_ADDRESS = 16, 48
MAX_CONNECTIONS_OF_AN_ADDRESS = 192
# Of a duck that takes messages of 256 MiB.
MAX_MESSAGES_OF_AN_ADDRESS = 8
MAX_CONTROL_EVENTS = 1024

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4


@pytest.fixture
def server():
    with serving("native") as running:
        yield running


@contextmanager
def _elsewhere(server):
    """A host with an address of its own."""
    with (
        closing(Meddler(server.endpoint, source="127.0.0.2")) as way,
        calling("native", [way.endpoint]) as fan_out,
    ):
        yield fan_out


def _frame(kind, stream_id, payload):
    head = len(payload).to_bytes(3, "big") + bytes([kind, 0])
    return head + stream_id.to_bytes(4, "big") + payload


def _session(server, use):
    """How `use`, a function of an endpoint, begins its calls: frames of its connection,
    without what it says of their end."""
    sent = bytearray()

    def keep(chunk, before):
        sent.extend(chunk)
        return chunk

    with closing(Meddler(server.endpoint)) as meddler:
        meddler.to_duck = keep
        use(meddler.endpoint)
    return _PREFACE + b"".join(
        frame for frame in _frames(sent) if frame[3] in (_DATA, _HEADERS, _SETTINGS)
    )


def _frames(session):
    at = len(_PREFACE)
    while at < len(session):
        end = at + 9 + int.from_bytes(session[at : at + 3], "big")
        yield bytes(session[at:end])
        at = end


def _without_messages(session):
    return _PREFACE + b"".join(f for f in _frames(session) if f[3] != _DATA)


def _send(server, session):
    address, port = server.endpoint.rsplit(":", 1)
    connection = socket.create_connection((address, int(port)), WAIT_S)
    connection.sendall(session)
    return connection


def _call_once(endpoint):
    with calling("native", [endpoint]) as fan_out:
        check_echo(fan_out, make_request())


def _refusal(act):
    """What a duck says against it; empty: nothing."""
    try:
        act()
    except DuckProtocolError as error:
        return str(error)
    return ""


def _is_refused(server, why):
    return why in _refusal(GrpcDescriber(server.endpoint).describe)


def test_calls_of_one_address_are_48_of_64(server):
    hold = threading.Event()
    message = codec.encode_request(make_request(), request_id=1, reply_dtype="bf16")

    def messages():
        yield message
        hold.wait(WAIT_S)

    with ExitStack() as stack:
        stack.callback(hold.set)
        calls = []
        # A connection for each.
        options = [("grpc.use_local_subchannel_pool", 1)]
        for _ in range(MAX_CALLS_OF_AN_ADDRESS // MAX_CALLS_OF_A_CONNECTION):
            channel = grpc.insecure_channel(server.endpoint, options=options)
            stack.enter_context(channel)
            for _ in range(MAX_CALLS_OF_A_CONNECTION):
                call = channel.stream_stream(FORWARD_METHOD)(messages(), timeout=WAIT_S)
                next(call)
                calls.append(call)
        assert _is_refused(server, "the hosts of an address have 48 calls at once")
        check_echo(stack.enter_context(_elsewhere(server)), make_request())


def test_connections_of_one_address_are_192_of_256(server):
    session = _session(server, lambda each: GrpcDescriber(each).describe())
    why = f"an address have {MAX_CONNECTIONS_OF_AN_ADDRESS} connections at once"
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS_OF_AN_ADDRESS):
            connection = stack.enter_context(_send(server, session))
            assert connection.recv(1)
        wait_until(lambda: _is_refused(server, why))
        check_echo(stack.enter_context(_elsewhere(server)), make_request())
    wait_until(lambda: not _is_refused(server, why))


def test_messages_that_never_end_take_one_address_s_share_of_memory(server):
    begun = _without_messages(_session(server, _call_once))
    announced = _frame(_DATA, 1, b"\0" + (256 << 20).to_bytes(4, "big"))
    with ExitStack() as stack:
        here = stack.enter_context(calling("native", [server.endpoint]))
        check_echo(here, make_request())
        for _ in range(MAX_MESSAGES_OF_AN_ADDRESS):
            connection = stack.enter_context(_send(server, begun))
            # Once it says who it is.
            assert connection.recv(1)
            connection.sendall(announced)

        why = "of an address have 2147483648 bytes of requests and replies at once"
        wait_until(lambda: why in _refusal(lambda: check_echo(here, make_request())))
        check_echo(stack.enter_context(_elsewhere(server)), make_request())
    _call_once(server.endpoint)


def test_calls_that_are_given_up_hold_no_requests():
    """Of a host that reads no replies, so that they wait."""
    message = encode_long_request()
    with (
        serving("native", max_message_bytes=8 << 20) as server,
        closing(Meddler(server.endpoint)) as meddler,
        grpc.insecure_channel(
            meddler.endpoint, options=[("grpc.max_receive_message_length", 8 << 20)]
        ) as channel,
    ):
        forward = channel.stream_stream(FORWARD_METHOD)
        # Nobody takes its replies, and grpcio gives no credit for more of them.
        stuck = forward((message for _ in range(200)), timeout=WAIT_S)

        def wait_until_quiet():
            """Until flow control holds the sender."""
            passed = -1

            def is_quiet():
                nonlocal passed
                passed, before = meddler.num_passed["duck"], passed
                return passed == before

            wait_until(is_quiet)

        wait_until_quiet()
        before = resident_bytes()
        for _ in range(20):
            call = forward((message for _ in range(200)), timeout=WAIT_S)
            wait_until_quiet()
            call.cancel()
        # 630 MB if their requests stayed; AddressSanitizer keeps 256 MB of any.
        assert resident_bytes() - before < 400 << 20
        stuck.cancel()


def test_questions_that_wait_are_bounded(server, monkeypatch):
    """A stranger asks, goes, and asks again, while the duck is slow to answer."""
    hold = threading.Event()
    check = "/grpc.health.v1.Health/Check"

    def slow(message):
        hold.wait(WAIT_S)
        return iter(())

    session = _session(server, lambda each: GrpcDescriber(each).health())
    monkeypatch.setitem(server._control._answers, check, slow)
    try:
        for _ in range(MAX_CONTROL_EVENTS):
            with _send(server, session) as connection:
                assert connection.recv(1)
        with pytest.raises(DuckUnavailable, match="too many calls wait"):
            GrpcDescriber(server.endpoint).health()
    finally:
        hold.set()
