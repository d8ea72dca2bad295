"""A message is the same, and so is its checksum, however HTTP/2 cuts it.

Messages are summed as they arrive, and long ones are received into their place: the
edges of frames, of messages and of what the socket gives must not matter.
"""

import contextlib
import itertools
import socket
import struct

import grpc
import numpy as np
import pytest

from testing.ducks.checksums import sealed
from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, needs_native, serving
from testing.waiting import WAIT_S
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.limits import FORWARD_METHOD

pytestmark = needs_native

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS, PADDED = 1, 4, 8

CUTS = {
    "byte by byte": ([1], 0),
    "around the checksum": ([9, 4, 3, 2, 1], 0),
    "padded": ([2, 300, 70_000], 3),
    "large": ([200_000, 65_536, 65_535, 65_537], 0),
    "joined": ([1 << 20], 0),
}


@pytest.fixture(params=CUTS)
def cut(request):
    return CUTS[request.param]


@pytest.fixture
def meddler():
    with serving("native") as server:
        proxy = Meddler(server.endpoint)
        yield proxy
        proxy.close()


def _frame(kind, flags, stream, payload):
    head = struct.pack(">IBI", len(payload) << 8 | kind, flags, stream)
    return head + payload


def recut(sizes, padding=0, head=b""):
    """For a Meddler: a direction's DATA in frames of these sizes, in turn.

    head: what stands before the direction's first frame.
    """
    turns = itertools.cycle(sizes)
    held = bytearray()  # the beginning of a frame

    def pieces(data, stream):
        while data:
            size = next(turns)
            part, data = data[:size], data[size:]
            if padding:
                part = bytes([padding]) + part + bytes(padding)
            yield _frame(DATA, PADDED if padding else 0, stream, part)

    def cut(chunk, before):
        if before == 0:
            held[:] = chunk[len(head) :]
            out = [head]
        else:
            held.extend(chunk)
            out = []
        data, stream = b"", 0
        while len(held) >= 9 and len(held) >= 9 + int.from_bytes(held[:3]):
            end = 9 + int.from_bytes(held[:3])
            frame = bytes(held[:end])
            del held[:end]
            is_data = frame[3] == DATA
            if not is_data or int.from_bytes(frame[5:9]) != stream:
                out += pieces(data, stream)
                data, stream = b"", int.from_bytes(frame[5:9])
            if is_data:
                data += frame[9:]
            if not is_data or frame[4] & END_STREAM:
                out += pieces(data, stream)
                data = b""
                out.append(_frame(DATA, END_STREAM, stream, b"") if is_data else frame)
        return b"".join([*out, *pieces(data, stream)])

    return cut


@pytest.mark.parametrize("rows", [1, 300])
def test_natives_understand_each_other_however_they_are_cut(meddler, cut, rows):
    sizes, padding = cut
    if rows * 4 > 1000 * min(sizes):
        pytest.skip("millions of frames")
    meddler.to_duck = recut(sizes, padding, PREFACE)
    meddler.to_host = recut(sizes, padding)
    # Under 9 KB each, and over 4 MB.
    requests = [
        make_request(rows, hidden_size=7168 if rows > 1 else 100 + seed, seed=seed)
        for seed in range(3)
    ]
    with calling("native", [meddler.endpoint]) as fan_out:
        # Until both have said so, a frame has 16 KiB at most.
        fan_out.send(make_request()).wait()
        pendings = [fan_out.send(request) for request in requests]
        for request, pending in zip(requests, pendings, strict=True):
            expected = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.wait().total, expected)
    # Nothing was sent again.
    assert meddler.num_connections == 1


def test_damage_at_the_end_is_found_however_it_is_cut(meddler, cut):
    sizes, padding = cut
    meddler.to_duck = recut(sizes, padding, PREFACE)
    request = make_request(1, hidden_size=64)
    good = codec.encode_request(request, request_id=7, reply_dtype="bf16")
    with grpc.insecure_channel(meddler.endpoint) as channel:
        forward = channel.stream_stream(FORWARD_METHOD)
        # The sum's bytes, and the last ones that it covers; its tag is another field.
        for at in (-1, -2, -3, -4, -6, -7):
            damaged = bytearray(good)
            damaged[at] ^= 1
            with pytest.raises(grpc.RpcError) as caught:
                list(forward(iter([good, bytes(damaged)]), timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert len(list(forward(iter([good] * 3), timeout=WAIT_S))) == 3


def test_a_checksum_with_a_longer_tag_is_not_the_last_five_bytes(meddler):
    """As codec.py has it."""
    request = make_request(1, hidden_size=64)
    good = codec.encode_request(request, request_id=7, reply_dtype="bf16")
    odd = good[:-5] + b"\xd5\x00" + good[-4:]
    with grpc.insecure_channel(meddler.endpoint) as channel:
        forward = channel.stream_stream(FORWARD_METHOD)
        with pytest.raises(grpc.RpcError) as caught:
            list(forward(iter([odd]), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", None),
        (sealed(b""), None),
        (b"\x55\0\0\0\1", grpc.StatusCode.DATA_LOSS),
        (b"\x55", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x55\0\0\0", grpc.StatusCode.INVALID_ARGUMENT),
        (sealed(b"") + b"\0", grpc.StatusCode.INVALID_ARGUMENT),
        (sealed(sealed(b"")), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_messages_about_as_short_as_a_checksum(meddler, message, code):
    with grpc.insecure_channel(meddler.endpoint) as channel:
        call = channel.stream_stream(FORWARD_METHOD)(iter([message]), timeout=WAIT_S)
        if code is None:
            # It parses, but asks for nothing.
            (reply,) = call
            assert codec.decode_reply(reply).status is codec.ReplyStatus.INVALID_REQUEST
            return
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is code


def test_data_that_http_2_drops_in_mid_message_leaves_the_server_well():
    """More of it than its content-length said, and then the end of its stream."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": FORWARD_METHOD,
        ":authority": "duck",
        "content-type": "application/grpc",
        "content-length": "200005",
    }
    block = b"".join(
        # Literals without Huffman's code, not to be remembered.
        b"\0"
        + bytes([len(text)])
        + name.encode()
        + bytes([len(value)])
        + value.encode()
        for name, value in headers.items()
        for text in [name]
    )
    with serving("native") as server:
        host, _, port = server.endpoint.rpartition(":")
        for size in (100_000, 200_000, 300_000, 400_000):
            session = b"".join(
                [
                    PREFACE,
                    _frame(SETTINGS, 0, 0, b""),
                    _frame(HEADERS, END_HEADERS, 1, block),
                    _frame(DATA, 0, 1, b"\0" + (500_000).to_bytes(4, "big")),
                    _frame(DATA, 0, 1, bytes(size)),
                    _frame(DATA, 0, 1, bytes(size)),
                    _frame(RST_STREAM, 0, 1, bytes(4)),
                    _frame(SETTINGS, 0, 0, bytes(range(6)) * 50_000),
                ]
            )
            with (
                socket.create_connection((host, int(port)), timeout=5) as raw,
                contextlib.suppress(OSError),
            ):
                raw.sendall(session)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
        with calling("native", [server.endpoint]) as fan_out:
            fan_out.send(make_request()).wait()
