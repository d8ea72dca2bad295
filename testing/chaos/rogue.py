"""A host that may call a duck, and misuses it."""

import random
import time
from collections.abc import Iterator

import grpc
import numpy as np

from vllm_duck.executor.duck import MoeRequest
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.limits import FORWARD_METHOD

MAX_CALLS = 16


class RogueHost:
    """Opens calls, sends requests that fit and that do not, and reads no reply."""

    def __init__(self, endpoint: str, rng: random.Random) -> None:
        self._rng = rng
        self._channel = grpc.insecure_channel(endpoint)

    def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        forward = self._channel.stream_stream(FORWARD_METHOD)
        with self._channel:
            while time.monotonic() < end_s:
                calls = [
                    forward(self._messages(end_s), timeout=seconds)
                    for _ in range(self._rng.randrange(1, MAX_CALLS))
                ]
                time.sleep(self._rng.uniform(0.0, 0.3))
                for call in calls:
                    if self._rng.random() < 0.5:
                        call.cancel()

    def _messages(self, end_s: float) -> Iterator[bytes]:
        rng = random.Random(self._rng.random())
        for request_id in range(rng.randrange(1, 20)):
            if time.monotonic() > end_s:
                return
            message = _request(request_id, rng)
            if rng.random() < 0.5:
                at = rng.randrange(len(message))
                message = message[:at] + rng.randbytes(8) + message[at:]
            yield message


def _request(request_id: int, rng: random.Random) -> bytes:
    """A request whose sizes and experts may or may not be this model's."""
    num_rows, num_topk = rng.randrange(1, 64), rng.randrange(1, 9)
    hidden_size = rng.choice((32, 256, 7168))
    numbers = np.random.default_rng(rng.randrange(1 << 31))
    request = MoeRequest(
        layer_idx=rng.randrange(8),
        hidden=numbers.integers(0, 1 << 16, (num_rows, hidden_size), np.uint16),
        topk_ids=numbers.integers(-2, 300, (num_rows, num_topk), np.int32),
        topk_weights=numbers.standard_normal((num_rows, num_topk), np.float32),
    )
    return codec.encode_request(request, request_id=request_id, reply_dtype="bf16")
