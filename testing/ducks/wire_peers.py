"""Every server and every client that speaks duck.proto, behind one form each."""

import threading
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from testing.ducks.echo import echo, echo_compute
from testing.ducks.mini_model import make_info
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckTimeout
from vllm_duck.executor.duck import MoeReply
from vllm_duck.executor.grpcio.fan_out import PythonFanOut
from vllm_duck.executor.grpcio.fan_out import _PendingSum as PythonPendingSum
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.transports import TRANSPORTS, choose_transport
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.limits import FORWARD_METHOD, MAX_MESSAGE_BYTES
from vllm_duck.executor.wire.security import ClientSecurity


def is_native_built():
    return choose_transport("auto", has_tls=False).transport.name == "native"


def has_native_tls():
    return choose_transport("auto", has_tls=True).transport.name == "native"


def replies_of(pending):
    """Wait for the partial sum of each duck, in duck order, instead of the total."""
    if isinstance(pending, PythonPendingSum):
        pending.wait()
        return pending._replies
    from vllm_duck.executor import _stream

    pending._fan_out.await_replies(pending._ticket, None)
    dtype = codec.NUMPY_DTYPE[pending._fan_out._reply_dtype]
    return [
        MoeReply(np.frombuffer(partial, dtype).reshape(pending._shape), *times_us)
        for partial, *times_us in _stream.ticket_replies(pending._ticket)
    ]


needs_native = pytest.mark.skipif(
    not is_native_built(), reason="this build is without the native stream"
)
NATIVE = pytest.param("native", marks=needs_native)
needs_native_tls = pytest.mark.skipif(
    not has_native_tls(), reason="this build's native stream is without TLS"
)
NATIVE_TLS = pytest.param("native", marks=needs_native_tls)
SERVERS = [NATIVE, "grpcio"]
# Ours; the third is a plain grpcio stub.
BOTH_CLIENTS = [NATIVE, "grpcio"]
CLIENTS = [*BOTH_CLIENTS, "stock"]


def check_echo(fan_out, request):
    """One call of one echo duck gives the hidden rows back."""
    expected = bf16_to_f32(request.hidden)
    np.testing.assert_array_equal(fan_out.send(request).wait().total, expected)


def check_echo_in_the_end(fan_out, request):
    """The same where the deadline is short: a slow machine may need another try."""

    def is_answered():
        try:
            check_echo(fan_out, request)
        except DuckTimeout:
            return False
        return True

    wait_until(is_answered)


@contextmanager
def serving(kind, *, listen="127.0.0.1:0", **options):
    """A running echo duck of one kind."""
    if kind == "native":
        from vllm_duck.executor.native.server import NativeDuckServer

        server = NativeDuckServer(echo_compute(), make_info(), listen=listen, **options)
    else:
        server = DuckServer(echo, make_info(), listen=listen, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop(0)


@contextmanager
def calling(
    kind,
    endpoints,
    *,
    deadline_s=WAIT_S,
    recover_s=0.0,
    reply_dtype="bf16",
    token=None,
    security=None,
    infos=None,
):
    """A client of one kind for these ducks, as a FanOut.

    security: with or without TLS; by default the token alone.
    infos: who they must be; by default as `serving` makes them.
    """
    identities = [identity_of(info) for info in infos or [make_info()] * len(endpoints)]
    common = {
        "deadline_s": deadline_s,
        "reply_dtype": reply_dtype,
        "security": security or ClientSecurity(token=token),
    }
    if kind == "stock":
        fan_out = PythonFanOut([StockDuck(each, **common) for each in endpoints])
    else:
        (transport,) = [each for each in TRANSPORTS if each.name == kind]
        fan_out = transport.connect(
            endpoints, identities=identities, recover_s=recover_s, **common
        )
    try:
        yield fan_out
    finally:
        fan_out.close()


class StockDuck:
    """Plain grpcio with a call for each request, as a stranger would write it."""

    def __init__(self, endpoint, *, deadline_s, reply_dtype, security):
        self.name = endpoint
        self._deadline_s = deadline_s
        self._reply_dtype = reply_dtype
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        if security.tls_ca is None:
            self._channel = grpc.insecure_channel(endpoint, options=options)
            return
        credentials = grpc.ssl_channel_credentials(
            security.tls_ca, security.tls_key, security.tls_cert
        )
        self._channel = grpc.secure_channel(endpoint, credentials, options=options)

    def send(self, request):
        message = codec.encode_request(
            request, request_id=1, reply_dtype=self._reply_dtype
        )
        call = self._channel.stream_stream(FORWARD_METHOD)(
            iter([message]), timeout=self._deadline_s
        )
        return _StockPending(call)

    def close(self):
        self._channel.close()


class _StockPending:
    def __init__(self, call):
        self._call = call
        self._reply = None
        self._lock = threading.Lock()

    def is_done(self):
        return self._reply is not None

    def wait(self):
        with self._lock:
            if self._reply is None:
                (message,) = self._call
                decoded = codec.decode_reply(message)
                self._reply = codec_reply(decoded)
        return self._reply


def codec_reply(decoded):
    from vllm_duck.executor.duck import MoeReply

    assert decoded.status is codec.ReplyStatus.OK, decoded.error
    return MoeReply(decoded.partial, decoded.queue_us, decoded.compute_us, 0)
