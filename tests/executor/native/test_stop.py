"""How a native duck parts from its hosts: stopping, and connections that have ended."""

import contextlib
import socket
import threading

import pytest

from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, needs_native, replies_of, serving
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckUnavailable

pytestmark = needs_native


@pytest.fixture
def server():
    with serving("native") as running:
        yield running


def test_a_duck_that_stops_ends_its_streams_and_is_then_unavailable(server):
    with calling("native", [server.endpoint]) as fan_out:
        fan_out.send(make_request()).wait()
        server.stop(5)
        with pytest.raises(DuckUnavailable, match=f"duck {server.endpoint}"):
            fan_out.send(make_request()).wait()


# The preface, SETTINGS, and the headers of a Forward call.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _literal(name, value):
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_HEADERS = b"".join(
    _literal(*pair)
    for pair in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/duck.v1.Duck/Forward"),
        (b":authority", b"duck"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
_OPEN_CALL = (
    _PREFACE
    + b"\0\0\0\4\0\0\0\0\0"
    + len(_HEADERS).to_bytes(3, "big")
    + b"\1\4\0\0\0\1"
    + _HEADERS
)


def _connected(endpoint):
    if endpoint.startswith("unix:"):
        host = socket.socket(socket.AF_UNIX)
        host.connect(endpoint.removeprefix("unix:"))
        return host
    address, _, port = endpoint.rpartition(":")
    return socket.create_connection((address, int(port)))


def _stop_with_unread_replies(server, meddler, fan_out):
    """Has the duck drain 20 requests whose replies the host cannot read yet."""
    sent = bytearray()
    meddler.to_duck = lambda chunk, before: sent.extend(chunk) or chunk
    fan_out.send(make_request()).wait()
    meddler.passes_to_host.clear()
    before = _data_bytes(sent)
    requests = [make_request(1, hidden_size=7168, seed=seed) for seed in range(20)]
    pendings = [fan_out.send(request) for request in requests]
    # A frame is a whole message here, of which nearly all is the hidden row.
    wait_until(lambda: _data_bytes(sent) >= before + 20 * 2 * 7168)
    wait_until(lambda: meddler.num_passed["duck"] == len(sent))
    stopper = threading.Thread(target=server.stop, args=(WAIT_S,), daemon=True)
    stopper.start()
    return list(zip(requests, pendings, strict=True)), stopper


def _data_bytes(session):
    """Payload of the DATA frames that are complete."""
    at, total = len(_PREFACE), 0
    while len(session) >= at + 9:
        size, kind = int.from_bytes(session[at : at + 3]), session[at + 3]
        at += 9 + size
        if kind == 0 and at <= len(session):
            total += size
    return total


def _check_replies(exchanges):
    for request, pending in exchanges:
        (reply,) = replies_of(pending)
        assert reply.partial.tobytes() == request.hidden.tobytes()


def test_what_has_arrived_is_answered_before_the_duck_stops(server):
    meddler = Meddler(server.endpoint)
    with calling("native", [meddler.endpoint]) as fan_out:
        exchanges, stopper = _stop_with_unread_replies(server, meddler, fan_out)
        meddler.passes_to_host.set()
        _check_replies(exchanges)
        stopper.join()
    meddler.close()


def test_replies_outlive_the_duck_that_gave_them(server):
    """A host that reads late, and still sends, loses nothing that was answered."""
    meddler = Meddler(server.endpoint)
    with calling("native", [meddler.endpoint]) as fan_out:
        exchanges, stopper = _stop_with_unread_replies(server, meddler, fan_out)
        # Longer than a duck waits for a host that has all its replies.
        stopper.join(0.5)
        late = fan_out.send(make_request())
        stopper.join(0.5)
        meddler.passes_to_host.set()
        _check_replies(exchanges)
        with pytest.raises(DuckUnavailable):
            replies_of(late)
        stopper.join()
    meddler.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_hosts_that_do_nothing_do_not_hold_up_a_stop(kind, tmp_path):
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path / 'duck'}"
    with serving("native", listen=listen) as server, contextlib.ExitStack() as stack:
        # One has said nothing; one reads no more; one broke off within a call.
        stack.enter_context(_connected(server.endpoint))
        meddler = Meddler(server.endpoint) if kind == "tcp" else None
        endpoint = meddler.endpoint if meddler else server.endpoint
        fan_out = stack.enter_context(calling("native", [endpoint]))
        fan_out.send(make_request()).wait()
        garbled = stack.enter_context(_connected(server.endpoint))
        garbled.sendall(_OPEN_CALL + b"\0\0\1\0\0\0\0\0\0x")
        if meddler:
            meddler.hold()
        # It may wait for longer than the test does.
        grace_s = 10 * WAIT_S
        stopper = threading.Thread(target=server.stop, args=(grace_s,), daemon=True)
        stopper.start()
        stopper.join(WAIT_S)
        assert not stopper.is_alive()
        if meddler:
            meddler.close()


def test_hosts_that_leave_their_ended_connections_open_keep_no_one_out(server):
    """More of them than a duck has room for."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            host = stack.enter_context(_connected(server.endpoint))
            # A call, and then a frame that ends the connection.
            host.sendall(_OPEN_CALL + b"\0\0\1\0\0\0\0\0\0x")
            with contextlib.suppress(ConnectionResetError):
                while host.recv(4096):
                    pass
        with calling("native", [server.endpoint]) as fan_out:
            fan_out.send(make_request()).wait()
