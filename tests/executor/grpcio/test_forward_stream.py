"""A stream answers in order, knows how long a request waited, and can drain."""

import threading

import pytest

from testing.ducks.mini_model import make_request
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckProtocolError
from vllm_duck.executor.grpcio.forward_stream import (
    MAX_QUEUED_REQUESTS,
    ForwardStream,
    OneAtATime,
)
from vllm_duck.executor.wire.codec import ReplyStatus, decode_reply, encode_request


def _messages(count):
    return [
        encode_request(make_request(), request_id=index, reply_dtype="bf16")
        for index in range(count)
    ]


def _zeros(request, reply_dtype):
    return request.hidden * 0


def test_replies_come_in_the_order_of_the_requests():
    stream = ForwardStream(iter(_messages(10)), OneAtATime(_zeros))
    replies = [decode_reply(message) for message in stream]
    assert [reply.request_id for reply in replies] == list(range(10))
    assert {reply.status for reply in replies} == {ReplyStatus.OK}


def test_a_request_that_waits_for_the_kernel_says_how_long():
    has_arrived = threading.Event()

    def messages():
        yield from _messages(2)
        # Asked for a third one: the second has arrived.
        has_arrived.set()

    def slow(request, reply_dtype):
        assert has_arrived.wait(WAIT_S)
        threading.Event().wait(0.02)
        return _zeros(request, reply_dtype)

    first, second = ForwardStream(messages(), OneAtATime(slow))
    assert decode_reply(first).compute_us >= 20_000
    assert decode_reply(second).queue_us >= 20_000


def test_the_queue_is_bounded():
    num_taken = 0
    may_end = threading.Event()

    def messages():
        nonlocal num_taken
        for message in _messages(1) * (3 * MAX_QUEUED_REQUESTS):
            num_taken += 1
            yield message

    def wait(request, reply_dtype):
        assert may_end.wait(WAIT_S)
        return _zeros(request, reply_dtype)

    replies = iter(ForwardStream(messages(), OneAtATime(wait)))
    first = threading.Thread(target=next, args=(replies,))
    first.start()
    threading.Event().wait(0.05)
    # One computes, MAX_QUEUED_REQUESTS wait, and the reader holds one more.
    assert num_taken <= MAX_QUEUED_REQUESTS + 2
    may_end.set()
    first.join(WAIT_S)
    assert len(list(replies)) == 3 * MAX_QUEUED_REQUESTS - 1


def test_draining_answers_what_has_arrived_and_ends():
    has_arrived, may_close = threading.Event(), threading.Event()

    def messages():
        yield from _messages(3)
        has_arrived.set()
        # A host that keeps its stream open.
        may_close.wait(WAIT_S)

    stream = ForwardStream(messages(), OneAtATime(_zeros))
    replies = iter(stream)
    next(replies)
    assert has_arrived.wait(WAIT_S)
    stream.drain()
    assert len(list(replies)) == 2
    may_close.set()


def test_a_transport_that_breaks_ends_the_stream():
    def messages():
        yield from _messages(1)
        raise ConnectionError("gone")

    assert len(list(ForwardStream(messages(), OneAtATime(_zeros)))) == 1


def test_bytes_that_do_not_parse_end_the_stream_with_our_error():
    replies = iter(ForwardStream(iter([*_messages(1), b"\xff"]), OneAtATime(_zeros)))
    next(replies)
    with pytest.raises(DuckProtocolError, match="expected a duck.v1.ForwardRequest"):
        next(replies)
