"""Damaged sessions and absurd messages leave the native server and client well.

Short here; scripts/sanitize.sh stream runs thousands under ASan and UBSan.
"""

import contextlib
import os
import socket
import threading

import grpc
import numpy as np
import pytest

from testing.ducks.checksums import sealed
from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, needs_native, serving
from vllm_duck.errors import DuckShapeError, DuckTransportError
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.limits import FORWARD_METHOD

pytestmark = needs_native

NUM_SESSIONS = int(os.environ.get("VLLM_DUCK_FUZZ_SESSIONS", "150"))
REQUEST = make_request(3, hidden_size=256)


def _record(use, server="native"):
    """The bytes of one connection, to the duck and to the host."""
    recorded = {"duck": b"", "host": b""}

    def record(name):
        def keep(chunk, before):
            recorded[name] += chunk
            return chunk

        return keep

    with serving(server) as running:
        meddler = Meddler(running.endpoint)
        meddler.to_duck, meddler.to_host = record("duck"), record("host")
        use(meddler.endpoint)
        meddler.close()
    return recorded


def _call_natively(endpoint):
    with calling("native", [endpoint]) as fan_out:
        for _ in range(3):
            fan_out.send(REQUEST).wait()


def _call_by_grpcio(endpoint):
    with calling("grpcio", [endpoint]) as fan_out:
        for _ in range(3):
            fan_out.send(REQUEST).wait()


def _describe(endpoint):
    duck = GrpcDescriber(endpoint)
    duck.describe()
    duck.health()


def _damaged(session, rng):
    """One to four of: flipped, cut out, doubled, moved, random and absurd bytes."""
    data = bytearray(session)
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(0, len(data)))
        size = int(rng.integers(1, 40))
        part = data[at : at + size]
        match rng.integers(0, 6):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = part
            case 3:
                data[at : at + size] = part[::-1]
            case 4:
                data[at : at + size] = rng.bytes(size)
            case 5:
                data[at : at + 4] = b"\xff\xff\xff\xff"
    # Half of them end early.
    return bytes(
        data[: len(data) if rng.random() < 0.5 else rng.integers(1, len(data))]
    )


@pytest.mark.parametrize("use", [_call_natively, _call_by_grpcio, _describe])
def test_damaged_sessions_leave_the_server_well(use):
    session = _record(use)["duck"]
    rng = np.random.default_rng(1)
    with serving("native", max_message_bytes=1 << 20) as server:
        host, _, port = server.endpoint.rpartition(":")
        for number in range(NUM_SESSIONS):
            with (
                socket.create_connection((host, int(port)), timeout=5) as raw,
                contextlib.suppress(OSError),
            ):
                raw.sendall(_damaged(session, rng))
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            if number % 50 == 0:
                _call_natively(server.endpoint)
        _call_natively(server.endpoint)
        _describe(server.endpoint)


@pytest.mark.parametrize("server", ["native", "grpcio"])
def test_damaged_sessions_give_the_client_an_error_or_the_right_sum(server):
    session = _record(_call_natively, server)["host"]
    expected = bf16_to_f32(REQUEST.hidden)
    # Within the first of the three replies: the host sends its request after it.
    cut = len(session) - 3 * REQUEST.hidden.nbytes
    rng = np.random.default_rng(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()

        def serve():
            with contextlib.suppress(OSError):
                while not is_over.is_set():
                    host, _ = listener.accept()
                    with host, contextlib.suppress(OSError):
                        host.settimeout(1)
                        damaged = _damaged(session, rng)
                        host.recv(65536)
                        host.sendall(damaged[:cut])
                        host.recv(65536)
                        host.sendall(damaged[cut:])
                        host.shutdown(socket.SHUT_WR)
                        while host.recv(65536):
                            pass

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        outcomes = set()
        for _ in range(NUM_SESSIONS):
            with calling("native", [endpoint], deadline_s=0.5) as fan_out:
                try:
                    total = fan_out.send(REQUEST).wait().total
                except (DuckTransportError, DuckShapeError) as error:
                    outcomes.add(type(error))
                    continue
                np.testing.assert_array_equal(total, expected)
                outcomes.add(np.ndarray)
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    # Both kinds of outcome: otherwise the damage is too little or too much.
    assert np.ndarray in outcomes
    assert len(outcomes) > 1


def test_malformed_and_absurd_messages_leave_the_server_well():
    rng = np.random.default_rng(3)
    good = codec.encode_request(REQUEST, request_id=1, reply_dtype="bf16")[:-5]
    with serving("native") as server, grpc.insecure_channel(server.endpoint) as channel:
        forward = channel.stream_stream(FORWARD_METHOD)
        for _ in range(NUM_SESSIONS):
            damaged = _damaged(good, rng)
            # With a checksum that is right, so that it reaches the parser's end.
            messages = [damaged, sealed(damaged), b"", _absurd(rng)]
            message = messages[int(rng.integers(0, 4))]
            with contextlib.suppress(grpc.RpcError):
                for reply in forward(iter([message, good]), timeout=5):
                    codec.decode_reply(reply)
        _call_natively(server.endpoint)


def _absurd(rng):
    """Fields of our numbers with the sizes that overflow."""
    sizes = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    fields = b"\x08\x01"
    for field in range(2, 7):
        fields += bytes([field << 3]) + _varint(sizes[int(rng.integers(0, 8))])
    for field in range(7, 10):
        size = [0, 4, 2**32, 2**64 - 1][int(rng.integers(0, 4))]
        fields += bytes([field << 3 | 2]) + _varint(size) + bytes(4 if size else 0)
    return fields


def _varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
