"""Damaged sessions and absurd messages leave the native server and client well.

Short here; `python -m testing.fuzz` has hundreds of thousands.
"""

import contextlib
import os
import random
import socket
import threading

import grpc
import numpy as np
import pytest

from testing.ducks.checksums import sealed
from testing.ducks.wire_peers import calling, needs_native, serving
from testing.fuzz.mutate import damaged, varint
from testing.fuzz.sessions import (
    REQUEST,
    call_by_grpcio,
    call_natively,
    describe,
    record,
)
from vllm_duck.errors import DuckShapeError, DuckTransportError
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.limits import FORWARD_METHOD

pytestmark = needs_native

NUM_SESSIONS = int(os.environ.get("VLLM_DUCK_FUZZ_SESSIONS", "150"))


@pytest.mark.parametrize("use", [call_natively, call_by_grpcio, describe])
def test_damaged_sessions_leave_the_server_well(use):
    session = record(use)["duck"]
    rng = random.Random(1)
    with serving("native", max_message_bytes=1 << 20) as server:
        host, _, port = server.endpoint.rpartition(":")
        for number in range(NUM_SESSIONS):
            with (
                socket.create_connection((host, int(port)), timeout=5) as raw,
                contextlib.suppress(OSError),
            ):
                raw.sendall(damaged(session, rng))
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            if number % 50 == 0:
                call_natively(server.endpoint)
        call_natively(server.endpoint)
        describe(server.endpoint)


@pytest.mark.parametrize("server", ["native", "grpcio"])
def test_damaged_sessions_give_the_client_an_error_or_the_right_sum(server):
    session = record(call_natively, server)["host"]
    expected = bf16_to_f32(REQUEST.hidden)
    # Within the first of the three replies: the host sends its request after it.
    cut = len(session) - 3 * REQUEST.hidden.nbytes
    rng = random.Random(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()

        def serve():
            with contextlib.suppress(OSError):
                while not is_over.is_set():
                    host, _ = listener.accept()
                    with host, contextlib.suppress(OSError):
                        host.settimeout(1)
                        answer = damaged(session, rng)
                        host.recv(65536)
                        host.sendall(answer[:cut])
                        host.recv(65536)
                        host.sendall(answer[cut:])
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
    rng = random.Random(3)
    good = codec.encode_request(REQUEST, request_id=1, reply_dtype="bf16")[:-5]
    with serving("native") as server, grpc.insecure_channel(server.endpoint) as channel:
        forward = channel.stream_stream(FORWARD_METHOD)
        for _ in range(NUM_SESSIONS):
            bad = damaged(good, rng)
            # With a checksum that is right, so that it reaches the parser's end.
            messages = [bad, sealed(bad), b"", _absurd(rng)]
            message = rng.choice(messages)
            with contextlib.suppress(grpc.RpcError):
                for reply in forward(iter([message, good]), timeout=5):
                    codec.decode_reply(reply)
        call_natively(server.endpoint)


def _absurd(rng):
    """Fields of our numbers with the sizes that overflow."""
    sizes = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    fields = b"\x08\x01"
    for field in range(2, 7):
        fields += bytes([field << 3]) + varint(rng.choice(sizes))
    for field in range(7, 10):
        size = rng.choice([0, 4, 2**32, 2**64 - 1])
        fields += bytes([field << 3 | 2]) + varint(size) + bytes(4 if size else 0)
    return fields
