"""Whole connections, recorded and damaged, to a native server and to its client."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import numpy as np

from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, serving
from testing.waiting import WAIT_S
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.wire.bf16 import bf16_to_f32

# Name, sound inputs, how a case is taken, and the share of a million cases.
Session: TypeAlias = tuple[str, tuple[bytes, ...], Callable[[bytes], object], int]

REQUEST = make_request(3, hidden_size=256)
# Then the server must still answer, and rightly.
_LOOK_EVERY = 50


def record(use: Callable[[str], None], server: str = "native") -> dict[str, bytes]:
    """The bytes of one connection, by where they go: "duck" and "host"."""
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


def call_natively(endpoint: str) -> None:
    with calling("native", [endpoint]) as fan_out:
        for _ in range(3):
            fan_out.send(REQUEST).wait()


def call_by_grpcio(endpoint: str) -> None:
    with calling("grpcio", [endpoint]) as fan_out:
        for _ in range(3):
            fan_out.send(REQUEST).wait()


def describe(endpoint: str) -> None:
    duck = GrpcDescriber(endpoint)
    duck.describe()
    duck.health()


@contextmanager
def server_targets() -> Iterator[list[Session]]:
    """A server at which whole connections arrive damaged; one target a kind of host."""
    kinds = {"native": call_natively, "grpcio": call_by_grpcio, "describe": describe}
    with serving("native", max_message_bytes=1 << 20) as server:
        take = _ServerTarget(server.endpoint).take
        yield [
            (f"session_of_{name}", (record(use)["duck"],), take, 60_000)
            for name, use in kinds.items()
        ]
        call_natively(server.endpoint)
        describe(server.endpoint)


class _ServerTarget:
    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._endpoint, self._address = endpoint, (host, int(port))
        self._num_cases = 0

    def take(self, case: bytes) -> None:
        """Send it and read to the end; then the server must still answer rightly."""
        with (
            socket.create_connection(self._address, timeout=WAIT_S) as raw,
            suppress(OSError),
        ):
            raw.sendall(case)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65536):
                pass
        self._num_cases += 1
        if self._num_cases % _LOOK_EVERY == 0:
            call_natively(self._endpoint)


@contextmanager
def client_target() -> Iterator[Session]:
    """A client that gets damaged answers: an error, or the right sum."""
    session = record(call_natively)["host"]
    # Within the first of the three replies: the host sends its request after it.
    cut = len(session) - 3 * REQUEST.hidden.nbytes
    with _Answering(cut) as server:
        yield "answers", (session,), server.take, 2_000


class _Answering:
    """A server that answers each connection with the bytes it is told."""

    def __init__(self, cut: int) -> None:
        self._cut, self._answer = cut, b""
        self._expected = bf16_to_f32(REQUEST.hidden)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def take(self, case: bytes) -> None:
        self._answer = case
        with calling("native", [self._endpoint], deadline_s=0.5) as fan_out:
            total = fan_out.send(REQUEST).wait().total
        np.testing.assert_array_equal(total, self._expected)

    def __enter__(self) -> "_Answering":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                host, _ = self._listener.accept()
                with host, suppress(OSError):
                    host.settimeout(1)
                    host.recv(65536)
                    host.sendall(self._answer[: self._cut])
                    host.recv(65536)
                    host.sendall(self._answer[self._cut :])
                    host.shutdown(socket.SHUT_WR)
                    while host.recv(65536):
                        pass
