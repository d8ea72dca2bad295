"""The native server of one duck: Forward in C++, the other methods from here.

One endpoint serves them all, to any gRPC client. C++ reports the calls of the other
methods as events, and one thread of Python answers them.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from vllm_duck.endpoints import remove_socket
from vllm_duck.executor import _stream
from vllm_duck.executor.duck import DuckInfo, ServedShard
from vllm_duck.executor.native.listeners import open_listeners
from vllm_duck.executor.native.tls import log_stale_files, server_tls
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.wire.codec import encode_info
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.limits import (
    DESCRIBE_METHOD,
    MAX_CONCURRENT_CALLS,
    MAX_MESSAGE_BYTES,
    SERVICE,
    TOKEN_PREFIX,
)
from vllm_duck.executor.wire.security import ServerSecurity

logger = logging.getLogger(__name__)

_CHECK_METHOD = f"/{health.SERVICE_NAME}/Check"
_WATCH_METHOD = f"/{health.SERVICE_NAME}/Watch"
_REFLECTION_METHOD = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"

# ControlEvent::Kind of csrc/stream/server/peer.h.
_START, _MESSAGE, _HALF_CLOSE, _GONE, _NOTICE, _STALE_TLS = range(6)


def make_server(
    moe: ServedShard, *, listen: str, security: ServerSecurity, max_message_bytes: int
) -> "NativeDuckServer":
    """`transports.MakeServer`."""
    return NativeDuckServer(
        moe.native_compute(),
        moe.info,
        listen=listen,
        security=security,
        max_message_bytes=max_message_bytes,
    )


class NativeDuckServer:
    """Serves one shard until it is stopped.

    compute: the shard's sums in C++, as `ShardMoe.native_compute` gives it.
    """

    def __init__(
        self,
        compute: object,
        info: DuckInfo,
        *,
        listen: str,
        security: ServerSecurity | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        security = security or ServerSecurity()
        security.check_listen(listen)
        tls = server_tls(security)
        sockets, self.endpoint = open_listeners(listen)
        token = security.token
        self._server = _stream.server_new(
            tuple(each.detach() for each in sockets),
            compute,
            "" if token is None else TOKEN_PREFIX + token,
            identity_of(info),
            max_message_bytes,
            MAX_CONCURRENT_CALLS,
            tls,
        )
        self._control = _Control(self._server, info)

    def start(self) -> None:
        self._control.set_health(health_pb2.HealthCheckResponse.SERVING)
        _stream.server_start(self._server)
        self._control.start()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, answer what has arrived, and close within `grace_s`."""
        self._control.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        _stream.server_stop(self._server, grace_s)
        self._control.join()
        remove_socket(self.endpoint)


class _Control:
    """Answers Describe, health and reflection, in a thread of its own."""

    def __init__(self, server: object, info: DuckInfo) -> None:
        self._server = server
        self._info = info
        self._reflection = reflection.ReflectionServicer(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        )
        self._answers: dict[str, Callable[[bytes], Iterator[bytes]]] = {
            DESCRIBE_METHOD: self._describe,
            _CHECK_METHOD: self._check_health,
            _REFLECTION_METHOD: self._reflect,
        }
        self._thread = threading.Thread(
            target=self._run, name="duck-control", daemon=True
        )
        # Methods of the calls that are open, and those that have sent a message.
        self._calls: dict[int, str] = {}
        self._asked: set[int] = set()
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._health = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        self._watchers: set[int] = set()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def set_health(self, status: int) -> None:
        with self._lock:
            self._health = status
            for call_id in self._watchers:
                _stream.server_send(self._server, call_id, _health_reply(status))

    def _run(self) -> None:
        while (event := _stream.server_next_event(self._server)) is not None:
            call_id, kind, method, message = event
            try:
                self._handle(call_id, kind, method, message)
            except _Refusal as refusal:
                self._finish(call_id, refusal.code, refusal.details)
            except Exception as error:
                logger.exception("a call of %s failed", self._calls.get(call_id))
                self._finish(call_id, grpc.StatusCode.INTERNAL, repr(error))

    def _handle(self, call_id: int, kind: int, method: str, message: bytes) -> None:
        if kind == _START:
            if method not in self._answers and method != _WATCH_METHOD:
                raise _Refusal(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            self._calls[call_id] = method
        elif kind == _GONE:
            self._calls.pop(call_id, None)
            self._asked.discard(call_id)
            with self._lock:
                self._watchers.discard(call_id)
        elif kind == _NOTICE:
            logger.warning(
                "the duck can take no further connection (%s); those that are open go "
                "on, and new ones wait. Raise the limit of open files (ulimit -n)",
                method,
            )
        elif kind == _STALE_TLS:
            log_stale_files(method)
        elif call_id not in self._calls:
            return
        elif kind == _MESSAGE:
            self._asked.add(call_id)
            self._answer(call_id, self._calls[call_id], message)
        elif self._calls[call_id] == _REFLECTION_METHOD:
            self._finish(call_id, grpc.StatusCode.OK)
        elif call_id not in self._asked:
            raise _Refusal(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{self._calls[call_id]} requires exactly one request message",
            )

    def _answer(self, call_id: int, method: str, message: bytes) -> None:
        try:
            if method == _WATCH_METHOD:
                return self._watch(call_id, message)
            for reply in self._answers[method](message):
                _stream.server_send(self._server, call_id, reply)
        except DecodeError as error:
            raise _Refusal(grpc.StatusCode.INTERNAL, str(error)) from error
        if method != _REFLECTION_METHOD:
            self._finish(call_id, grpc.StatusCode.OK)

    def _describe(self, message: bytes) -> Iterator[bytes]:
        yield encode_info(replace(self._info, resident_bytes=resident_bytes()))

    def _check_health(self, message: bytes) -> Iterator[bytes]:
        if not _is_of_this_duck(message):
            raise _Refusal(grpc.StatusCode.NOT_FOUND, "no such service")
        yield _health_reply(self._health)

    def _watch(self, call_id: int, message: bytes) -> None:
        """Send the status now and at every change; of a service that nobody has, that
        it is unknown, and the call stays open, as the health protocol wants it."""
        with self._lock:
            status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if _is_of_this_duck(message):
                status = self._health
                self._watchers.add(call_id)
            _stream.server_send(self._server, call_id, _health_reply(status))

    def _reflect(self, message: bytes) -> Iterator[bytes]:
        request = reflection_pb2.ServerReflectionRequest.FromString(message)
        for reply in self._reflection.ServerReflectionInfo(iter([request]), None):
            yield reply.SerializeToString()

    def _finish(self, call_id: int, code: grpc.StatusCode, details: str = "") -> None:
        _stream.server_finish(self._server, call_id, code.value[0], details)


def _is_of_this_duck(message: bytes) -> bool:
    request = health_pb2.HealthCheckRequest.FromString(message)
    return request.service in ("", SERVICE)


def _health_reply(status: int) -> bytes:
    return health_pb2.HealthCheckResponse(status=status).SerializeToString()


class _Refusal(Exception):
    """Ends a call with a status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
