"""The least that a call over grpcio costs: bytes there and back, nothing else.

A stream of plain grpcio at both ends, without protobuf, checksum, kernel or deadline.
The server has the last cpu, as a local duck beside a host has.
"""

import contextlib
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from benchmarks.common import end_with_parent, running, serve
from vllm_duck.executor.duck import FanOut, InFlight, MoeRequest, MoeSum
from vllm_duck.executor.system.cpus import (
    allowed_cpus,
    run_on_cpus,
    set_thread_cpus,
    thread_cpus,
)

_SERVICE, _METHOD = "echo", "Echo"


@contextmanager
def echoed(ducks: FanOut) -> Iterator[FanOut]:
    """`ducks` of this process, whose sums wait for an echo of the request's rows."""
    with tempfile.TemporaryDirectory(prefix="grpcio-echo-") as directory:
        endpoint = f"unix:{directory}/echo"
        command = [sys.executable, "-m", "benchmarks.peers.grpcio_echo", endpoint]
        with running(command):
            fan_out = run_on_cpus(
                lambda: _EchoedFanOut(ducks, endpoint), allowed_cpus()
            )
            try:
                yield fan_out
            finally:
                fan_out.close()


class _EchoedFanOut:
    """One request at a time: replies are taken for those of the oldest request."""

    def __init__(self, ducks: FanOut, endpoint: str) -> None:
        self._ducks = ducks
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(
            endpoint, options=[("grpc.enable_http_proxy", 0)]
        )
        replies = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(
            iter(self._outbox.get, None)
        )
        threading.Thread(target=self._read, args=(replies,), daemon=True).start()

    def send(self, request: MoeRequest) -> InFlight[MoeSum]:
        self._outbox.put(request.hidden.tobytes())
        return _EchoedSum(self._ducks, request, self._inbox)

    def statistics(self) -> list:
        return self._ducks.statistics()

    def begin_step(self, limit_s: float) -> None:
        self._ducks.begin_step(limit_s)

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()

    def _read(self, replies: Iterator[bytes]) -> None:
        # Raised when the channel is closed.
        with contextlib.suppress(grpc.RpcError):
            for message in replies:
                self._inbox.put(message)


class _EchoedSum:
    def __init__(
        self, ducks: FanOut, request: MoeRequest, inbox: queue.SimpleQueue[bytes]
    ) -> None:
        self._ducks = ducks
        self._request = request
        self._inbox = inbox
        self._sum: MoeSum | None = None

    def is_done(self) -> bool:
        return self._sum is not None

    def wait(self) -> MoeSum:
        if self._sum is None:
            # An echo that died would have the benchmark wait for ever.
            self._inbox.get(timeout=60)
            self._sum = self._ducks.send(self._request).wait()
        return self._sum


def main() -> None:
    set_thread_cpus(sorted(thread_cpus())[-1:])
    end_with_parent()

    def echo(messages: Iterator[bytes], context: object) -> Iterator[bytes]:
        yield from messages

    handler = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
    )
    server.add_insecure_port(sys.argv[1])
    serve(server.start)


if __name__ == "__main__":
    main()
