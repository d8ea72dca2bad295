"""Both servers end odd but legal gRPC calls with the same status.

Two differences are wanted. The native server reads no compressed message, and says so
with the status that gRPC has for it. And a header of more than 64 KiB ends its
connection, where grpcio's ends the call: nghttp2 does not go on behind one.
"""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import SERVERS, serving
from testing.waiting import WAIT_S
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.limits import DESCRIBE_METHOD, FORWARD_METHOD, SERVICE
from vllm_duck.executor.wire.security import ServerSecurity

CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
REFLECTION_V1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
TOKEN = ("authorization", "Bearer secret")


def _health(service):
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


def _reflect(**request):
    return reflection_pb2.ServerReflectionRequest(**request).SerializeToString()


_FORWARD = codec.encode_request(make_request(), request_id=1, reply_dtype="bf16")
_LIST = _reflect(list_services="")
_NOBODY = _reflect(file_containing_symbol="no.body")

# What is called, the messages, and the status that ends the call.
CALLS = {
    "a method nobody has": (f"/{SERVICE}/Nothing", [b""], "UNIMPLEMENTED"),
    "a service nobody has": ("/other.Service/Do", [b""], "UNIMPLEMENTED"),
    "a path that is none": ("/", [b""], "UNIMPLEMENTED"),
    "describe": (DESCRIBE_METHOD, [b""], "OK"),
    "describe, unknown fields": (DESCRIBE_METHOD, [b"\x08\x01"], "OK"),
    "describe, no message": (DESCRIBE_METHOD, [], "UNIMPLEMENTED"),
    "describe, two messages": (DESCRIBE_METHOD, [b"", b""], "OK"),
    "check of the server": (CHECK, [_health("")], "OK"),
    "check of the duck": (CHECK, [_health(SERVICE)], "OK"),
    "check of nobody": (CHECK, [_health("nobody")], "NOT_FOUND"),
    "check, garbage": (CHECK, [b"\xff"], "INTERNAL"),
    "check, no message": (CHECK, [], "UNIMPLEMENTED"),
    "forward": (FORWARD_METHOD, [_FORWARD], "OK"),
    "forward, no message": (FORWARD_METHOD, [], "OK"),
    "forward, garbage": (FORWARD_METHOD, [b"\xff"], "INVALID_ARGUMENT"),
    "reflection": (REFLECTION, [_LIST], "OK"),
    "reflection of nobody": (REFLECTION, [_NOBODY], "OK"),
    "reflection, no message": (REFLECTION, [], "OK"),
    "reflection, garbage": (REFLECTION, [b"\xff"], "INTERNAL"),
    "reflection, another version": (REFLECTION_V1, [_LIST], "UNIMPLEMENTED"),
}
# The same with what is sent as metadata beside the token.
METADATA = {
    "4 kB": ([("x-filler", "x" * 4_000)], "OK"),
    "20 kB": ([("x-filler", "x" * 20_000)], "RESOURCE_EXHAUSTED"),
    "60 kB": ([("x-filler", "x" * 60_000)], "RESOURCE_EXHAUSTED"),
    "1000 keys": ([(f"x-{i}", "y" * 20) for i in range(1000)], "RESOURCE_EXHAUSTED"),
    "bytes": ([("x-bin", b"\x00\xff")], "OK"),
    "a key twice": ([("x-a", "1"), ("x-a", "2")], "OK"),
}


@pytest.fixture(params=SERVERS)
def channel(request):
    security = ServerSecurity(token="secret")
    with (
        serving(request.param, security=security) as server,
        grpc.insecure_channel(server.endpoint) as opened,
    ):
        yield opened


def _status(channel, method, messages, metadata):
    call = channel.stream_stream(method)(
        iter(messages), timeout=WAIT_S, metadata=metadata
    )
    try:
        list(call)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("name", CALLS)
def test_an_odd_call_ends_as_at_grpcio(channel, name):
    method, messages, status = CALLS[name]
    assert _status(channel, method, messages, [TOKEN]) == status
    # The connection goes on.
    assert _status(channel, DESCRIBE_METHOD, [b""], [TOKEN]) == "OK"


@pytest.mark.parametrize("name", CALLS)
def test_without_the_token_only_health_answers(channel, name):
    method, messages, status = CALLS[name]
    expected = status if method == CHECK else "UNAUTHENTICATED"
    assert _status(channel, method, messages, []) == expected


@pytest.mark.parametrize("method", [DESCRIBE_METHOD, FORWARD_METHOD, "/no/body"])
@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_taken_up_to_16_kb(channel, name, method):
    metadata, status = METADATA[name]
    messages = [b""] if method == DESCRIBE_METHOD else []
    if method == "/no/body" and status == "OK":
        status = "UNIMPLEMENTED"
    assert _status(channel, method, messages, [TOKEN, *metadata]) == status
    assert _status(channel, DESCRIBE_METHOD, [b""], [TOKEN]) == "OK"


@pytest.mark.parametrize("service", ["", SERVICE])
def test_who_watches_the_duck_is_told_its_health(channel, service):
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S
    )
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_who_watches_an_unknown_service_is_told_so_and_the_call_stays_open(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="nobody")
    watch = stub.Watch(request, timeout=WAIT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    # An answer to a later call, in order, and nothing has ended the watch before it.
    stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
    assert watch.is_active()
    watch.cancel()


def test_a_call_ends_at_the_deadline_of_its_caller(channel):
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=0.2
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(watch)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
