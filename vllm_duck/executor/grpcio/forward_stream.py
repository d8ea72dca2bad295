"""One host's Forward stream on a duck: arrivals, the queue, the replies.

A reader thread takes the messages off the wire and stamps their arrival while the
kernel works, so that `queue_us` is true even when both lanes are in flight. The queue
is bounded: when it is full the reader stops reading, and HTTP/2 flow control makes the
host wait.
"""

import logging
import threading
import time
from collections.abc import Iterator
from queue import Queue

from vllm_duck.errors import DuckShapeError
from vllm_duck.executor.duck import MoeFunction, Partial
from vllm_duck.executor.wire.codec import (
    NUMPY_DTYPE,
    DecodedRequest,
    ReplyStatus,
    RequestShapeError,
    decode_request,
    encode_refusal,
    encode_reply,
)

logger = logging.getLogger(__name__)

MAX_QUEUED_REQUESTS = 64

# Ends the replies: the host has closed its side, or the duck drains.
_END = None


class OneAtATime:
    """The kernel of a duck: computes for all streams, one request at a time.

    The kernel uses all of the duck's threads, so two requests at once would only
    make both late.
    """

    def __init__(self, function: MoeFunction) -> None:
        self._function = function
        self._lock = threading.Lock()

    def answer(self, call: DecodedRequest, *, arrival_ns: int) -> bytes:
        """Compute one request; whatever goes wrong becomes the status of its reply."""
        try:
            with self._lock:
                start_ns = time.perf_counter_ns()
                partial = self._function(call.request, call.reply_dtype)
                end_ns = time.perf_counter_ns()
            _check_partial(partial, call)
        except DuckShapeError as error:
            return encode_refusal(
                call.request_id, ReplyStatus.INVALID_REQUEST, error=str(error)
            )
        except Exception as error:
            logger.exception("request %d failed", call.request_id)
            return encode_refusal(
                call.request_id,
                ReplyStatus.INTERNAL,
                error=f"{type(error).__name__}: {error}",
            )
        return encode_reply(
            partial,
            request_id=call.request_id,
            queue_us=(start_ns - arrival_ns) // 1000,
            compute_us=(end_ns - start_ns) // 1000,
        )


class ForwardStream:
    """Iterate over it for the replies, in the order of the requests.

    Raises while iterating:
        DuckProtocolError: a message did not parse or is damaged; the stream cannot go
            on.
    """

    def __init__(self, messages: Iterator[bytes], kernel: OneAtATime) -> None:
        self._messages = messages
        self._kernel = kernel
        self._arrivals: Queue[tuple[bytes, int] | None] = Queue(MAX_QUEUED_REQUESTS)

    def drain(self) -> None:
        """Answer what has arrived, then end."""
        self._arrivals.put(_END)

    def __iter__(self) -> Iterator[bytes]:
        threading.Thread(target=self._read, name="duck-reader", daemon=True).start()
        while (arrival := self._arrivals.get()) is not _END:
            message, arrival_ns = arrival
            try:
                call = decode_request(message)
            except RequestShapeError as error:
                yield encode_refusal(
                    error.request_id, ReplyStatus.INVALID_REQUEST, error=str(error)
                )
                continue
            yield self._kernel.answer(call, arrival_ns=arrival_ns)

    def _read(self) -> None:
        try:
            for message in self._messages:
                self._arrivals.put((message, time.perf_counter_ns()))
        except Exception as error:
            # The transport raises a bare Exception when the host goes away.
            logger.debug("stream ended: %r", error)
        self._arrivals.put(_END)


def _check_partial(partial: Partial, call: DecodedRequest) -> None:
    expected = (call.request.hidden.shape, NUMPY_DTYPE[call.reply_dtype])
    if (partial.shape, partial.dtype) != expected:
        raise RuntimeError(
            f"the kernel must return {expected}, got {(partial.shape, partial.dtype)}"
        )
    if not partial.flags.c_contiguous:
        raise RuntimeError("the kernel must return a C-contiguous array")
