"""The codec gives back what it was given, and refuses bytes that do not fit."""

import contextlib
import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from testing.ducks.checksums import sealed
from testing.ducks.mini_model import make_info, make_request
from vllm_duck.errors import DuckProtocolError, DuckShapeError
from vllm_duck.executor.wire import codec, duck_pb2
from vllm_duck.executor.wire.codec import ChecksumError, ReplyStatus, RequestShapeError


@pytest.mark.parametrize(
    ("num_rows", "hidden_size"), [(0, 32), (1, 32), (2, 33), (300, 7168)]
)
@pytest.mark.parametrize("reply_dtype", ["bf16", "fp32"])
def test_a_request_comes_back_as_it_was(num_rows, hidden_size, reply_dtype):
    request = make_request(max(num_rows, 1), hidden_size=hidden_size)
    if num_rows == 0:
        request = type(request)(
            layer_idx=2,
            hidden=request.hidden[:0],
            topk_ids=request.topk_ids[:0],
            topk_weights=request.topk_weights[:0],
        )
    encoded = codec.encode_request(request, request_id=7, reply_dtype=reply_dtype)
    decoded = codec.decode_request(encoded)
    assert decoded.request_id == 7
    assert decoded.reply_dtype == reply_dtype
    assert decoded.request.layer_idx == request.layer_idx
    for name in ("hidden", "topk_ids", "topk_weights"):
        got, expected = getattr(decoded.request, name), getattr(request, name)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("hidden_size", [32, 33, 8192])
def test_the_generated_class_reads_what_is_written(hidden_size):
    request = make_request(hidden_size=hidden_size)
    encoded = codec.encode_request(request, request_id=7, reply_dtype="fp32")
    expected = duck_pb2.ForwardRequest(
        request_id=7,
        layer_idx=request.layer_idx,
        num_rows=request.hidden.shape[0],
        hidden_size=request.hidden.shape[1],
        num_topk=request.topk_ids.shape[1],
        reply_dtype=duck_pb2.DTYPE_F32,
        hidden=request.hidden.tobytes(),
        topk_ids=request.topk_ids.tobytes(),
        topk_weights=request.topk_weights.tobytes(),
    )
    wire = duck_pb2.ForwardRequest.FromString(encoded)
    wire.ClearField("checksum")
    assert wire == expected
    assert encoded == sealed(encoded[:-5])
    # A kernel can read the rows where they lie.
    assert encoded.index(expected.hidden) % 2 == 0


@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (300, 7168)])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_a_reply_comes_back_as_it_was(shape, dtype):
    partial = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    message = codec.encode_reply(partial, request_id=9, queue_us=5, compute_us=6)
    reply = codec.decode_reply(message)
    assert (reply.request_id, reply.queue_us, reply.compute_us) == (9, 5, 6)
    assert reply.status is ReplyStatus.OK
    assert reply.partial.dtype == dtype
    np.testing.assert_array_equal(reply.partial, partial)


def test_a_refusal_has_its_reason_and_no_tensor():
    message = codec.encode_refusal(9, ReplyStatus.INVALID_REQUEST, error="too wide")
    reply = codec.decode_reply(message)
    assert (reply.request_id, reply.error, reply.partial) == (9, "too wide", None)
    assert reply.status is ReplyStatus.INVALID_REQUEST


def test_an_info_comes_back_as_it_was():
    assert codec.decode_info(codec.encode_info(make_info())) == make_info()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"isa": "avx2\x1b[2J"}, "whose isa is a word .*got 'avx2.x1b"),
        ({"weight_format": "bf16 columns=0:1"}, "weight_format is a word"),
        ({"model_fingerprint": 65 * "0"}, "model_fingerprint is a word of at most 64"),
        ({"layer_ids": tuple(range(100_000))}, "of at most 65536 bytes, got"),
    ],
)
def test_what_a_duck_says_of_itself_is_short_and_plain(changes, match):
    """It goes to terminals and logs."""
    message = codec.encode_info(replace(make_info(), **changes))
    with pytest.raises(DuckProtocolError, match=match):
        codec.decode_info(message)


def test_reply_statuses_are_those_of_the_proto():
    ours = {f"STATUS_{status.name}": status.value for status in ReplyStatus}
    assert ours == dict(duck_pb2.Status.items())


@pytest.mark.parametrize(
    ("decode", "match"),
    [
        (codec.decode_request, "expected a duck.v1.ForwardRequest, got 3 bytes"),
        (codec.decode_reply, "expected a duck.v1.ForwardReply, got 3 bytes"),
        (codec.decode_info, "expected a duck.v1.DescribeReply, got 3 bytes"),
    ],
)
def test_bytes_that_do_not_parse_are_a_protocol_error(decode, match):
    with pytest.raises(DuckProtocolError, match=match):
        decode(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_rows": 4}, r"hidden of shape \[4, 32\] must have 256 bytes, got 192"),
        ({"hidden_size": 2**31}, "hidden of shape"),
        (
            {"num_rows": 2**31, "num_topk": 2**31, "hidden_size": 0, "hidden": b""},
            "must have 2\\^64 or more bytes, got 24",
        ),
        ({"num_topk": 3}, r"topk_ids of shape \[3, 3\] must have 36 bytes, got 24"),
        ({"topk_weights": b"1"}, r"topk_weights of shape \[3, 2\] must have 24 bytes"),
        ({"reply_dtype": 0}, "reply_dtype must be DTYPE_BF16 or DTYPE_F32, got 0"),
        ({"reply_dtype": 9}, "reply_dtype must be DTYPE_BF16 or DTYPE_F32, got 9"),
    ],
)
def test_a_request_that_does_not_fit_itself_names_its_id(changes, match):
    encoded = codec.encode_request(make_request(), request_id=7, reply_dtype="bf16")
    wire = duck_pb2.ForwardRequest.FromString(encoded)
    wire.ClearField("checksum")
    for name, value in changes.items():
        setattr(wire, name, value)
    with pytest.raises(RequestShapeError, match=match) as caught:
        codec.decode_request(sealed(wire.SerializeToString()))
    assert caught.value.request_id == 7


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_rows": 4}, r"partial of shape \[4, 4\] must have 64 bytes, got 48"),
        ({"dtype": 0}, "dtype must be DTYPE_BF16 or DTYPE_F32, got 0"),
        ({"status": 77}, "77 is not a valid ReplyStatus"),
    ],
)
def test_a_reply_that_does_not_fit_itself_is_a_protocol_error(changes, match):
    partial = np.zeros((3, 4), np.float32)
    message = codec.encode_reply(partial, request_id=1, queue_us=0, compute_us=0)
    wire = duck_pb2.ForwardReply.FromString(message)
    wire.ClearField("checksum")
    for name, value in changes.items():
        setattr(wire, name, value)
    with pytest.raises(DuckProtocolError, match=match):
        codec.decode_reply(sealed(wire.SerializeToString()))


def test_a_request_without_a_checksum_is_taken_and_a_reply_is_not():
    encoded = codec.encode_request(make_request(), request_id=7, reply_dtype="bf16")
    decoded = codec.decode_request(encoded[:-5])
    assert decoded.request_id == 7
    partial = np.zeros((3, 4), np.float32)
    message = codec.encode_reply(partial, request_id=1, queue_us=0, compute_us=0)
    with pytest.raises(DuckProtocolError, match="it has no checksum"):
        codec.decode_reply(message[:-5])


def test_nothing_may_follow_the_checksum():
    encoded = codec.encode_request(make_request(), request_id=7, reply_dtype="bf16")
    with pytest.raises(DuckProtocolError, match="that do not parse"):
        codec.decode_request(encoded + b"\x08\x08")


def test_a_wrong_checksum_says_so():
    encoded = codec.encode_request(make_request(), request_id=7, reply_dtype="bf16")
    damaged = encoded[:-1] + bytes([encoded[-1] ^ 1])
    with pytest.raises(ChecksumError, match="with a wrong checksum"):
        codec.decode_request(damaged)


def test_numbers_that_no_message_holds_are_refused():
    request = make_request()
    too_large = dataclasses.replace(request, layer_idx=1 << 32)
    with pytest.raises(DuckShapeError, match="must be below 2\\^32, got 4294967296"):
        codec.encode_request(too_large, request_id=7, reply_dtype="bf16")
    with pytest.raises(OverflowError):
        codec.encode_request(
            dataclasses.replace(request, layer_idx=-1), request_id=7, reply_dtype="bf16"
        )
    partial = np.zeros((3, 4), np.float32)
    with pytest.raises(DuckShapeError, match="must be below 2"):
        codec.encode_reply(partial, request_id=1, queue_us=0, compute_us=1 << 32)
    numpy_number = dataclasses.replace(request, layer_idx=np.int64(2))
    encoded = codec.encode_request(numpy_number, request_id=7, reply_dtype="bf16")
    assert codec.decode_request(encoded).request.layer_idx == 2


def test_a_reply_is_read_by_the_generated_class():
    partial = np.arange(12).reshape(3, 4).astype(np.float32)
    message = codec.encode_reply(partial, request_id=9, queue_us=0, compute_us=1 << 31)
    wire = duck_pb2.ForwardReply.FromString(message)
    assert message == sealed(message[:-5])
    assert (wire.request_id, wire.status, wire.error) == (9, duck_pb2.STATUS_OK, "")
    assert (wire.num_rows, wire.hidden_size, wire.dtype) == (3, 4, duck_pb2.DTYPE_F32)
    assert (wire.queue_us, wire.compute_us) == (0, 1 << 31)
    assert wire.partial == partial.tobytes()


def test_tensors_at_odd_addresses_are_read():
    request = make_request()
    wire = duck_pb2.ForwardRequest.FromString(
        codec.encode_request(request, request_id=7, reply_dtype="bf16")
    )
    wire.ClearField("checksum")
    for request_id in (1, 1 << 7):  # one byte, and two
        wire.request_id = request_id
        decoded = codec.decode_request(sealed(wire.SerializeToString())).request
        for name in ("hidden", "topk_ids", "topk_weights"):
            tensor = getattr(decoded, name)
            assert tensor.flags.aligned
            np.testing.assert_array_equal(tensor, getattr(request, name))


def test_every_changed_byte_of_a_message_is_an_error():
    partial = np.arange(12).reshape(3, 4).astype(np.float32)
    reply = codec.encode_reply(partial, request_id=9, queue_us=5, compute_us=6)
    request = codec.encode_request(make_request(1), request_id=7, reply_dtype="bf16")
    for position in range(len(reply)):
        damaged = bytearray(reply)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DuckProtocolError):
            codec.decode_reply(bytes(damaged))
    # The tag of the checksum is left out: without it a request is unchecked.
    for position in range(len(request) - 5):
        damaged = bytearray(request)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(DuckProtocolError):
            codec.decode_request(bytes(damaged))


def test_random_bytes_never_do_anything_but_raise_our_errors():
    rng = np.random.default_rng(0)
    good = codec.encode_request(make_request(), request_id=7, reply_dtype="bf16")
    for _ in range(2000):
        message = bytearray(good)
        for position in rng.integers(0, len(message), 3):
            message[position] = rng.integers(0, 256)
        del message[int(rng.integers(0, len(message))) :]
        with contextlib.suppress(DuckProtocolError, RequestShapeError):
            codec.decode_request(bytes(message))
