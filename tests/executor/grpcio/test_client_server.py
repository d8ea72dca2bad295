"""A client and a server over a real connection: ids, deadlines, refusals, the end."""

import socket
import threading
from concurrent import futures

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from testing.ducks.bf16 import f32_to_bf16
from testing.ducks.mini_model import LAYER_IDS, make_info, make_request
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import (
    DuckConfigError,
    DuckProtocolError,
    DuckShapeError,
    DuckTimeout,
    DuckUnavailable,
)
from vllm_duck.executor.grpcio import server as server_module
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.wire import codec, duck_pb2, duck_pb2_grpc
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.limits import FORWARD_METHOD, SERVICE


def echo(request, reply_dtype):
    """Twice the hidden rows: easy to recognise, different for each request."""
    if request.layer_idx not in LAYER_IDS:
        raise DuckShapeError(f"no layer {request.layer_idx}")
    doubled = 2 * bf16_to_f32(request.hidden)
    return doubled if reply_dtype == "fp32" else f32_to_bf16(doubled)


class Gate:
    """A function that says when it has begun, and ends when it may."""

    def __init__(self):
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, request, reply_dtype):
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        return echo(request, reply_dtype)


@pytest.fixture
def start_server():
    servers = []

    def start(function=echo, *, listen="127.0.0.1:0", **options):
        server = DuckServer(function, make_info(), listen=listen, **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop(0)


def test_describe_gives_the_info_with_the_memory_of_now(start_server, describer):
    info = describer(start_server().endpoint).describe()
    assert info.resident_bytes > make_info().resident_bytes
    assert info == make_info(resident_bytes=info.resident_bytes)


@pytest.mark.parametrize("reply_dtype", ["bf16", "fp32"])
def test_a_call_gives_the_partial_sum(start_server, connect, reply_dtype):
    duck = connect(start_server().endpoint, reply_dtype=reply_dtype)
    reply = duck.send(make_request()).wait()
    np.testing.assert_array_equal(reply.partial, echo(make_request(), reply_dtype))
    assert reply.rtt_us >= reply.compute_us + reply.queue_us


def test_a_unix_socket_works_and_is_private_and_goes_away(
    start_server, connect, tmp_path
):
    path = tmp_path / "duck"
    server = start_server(listen=f"unix:{path}")
    connect(server.endpoint).send(make_request()).wait()
    assert path.stat().st_mode & 0o777 == 0o600
    server.stop(0)
    assert not path.exists()


def test_a_call_is_done_when_its_result_is_there(start_server, connect):
    gate = Gate()
    pending = connect(start_server(gate).endpoint).send(make_request())
    assert gate.has_begun.wait(WAIT_S)
    assert not pending.is_done()
    gate.may_end.set()
    pending.wait()
    assert pending.is_done()


def test_several_calls_in_flight_find_their_own_replies(start_server, connect):
    duck = connect(start_server().endpoint, reply_dtype="fp32")
    requests = [make_request(1 + seed % 3, seed=seed) for seed in range(100)]
    pendings = [duck.send(request) for request in requests]
    for request, pending in reversed(list(zip(requests, pendings, strict=True))):
        np.testing.assert_array_equal(pending.wait().partial, echo(request, "fp32"))


def test_a_result_may_be_asked_for_twice(start_server, connect):
    pending = connect(start_server().endpoint).send(make_request())
    assert pending.wait() is pending.wait()


def test_a_full_prefill_chunk_passes(start_server, connect):
    # 2,341 rows of 7168 bf16 are 32 MiB; gRPC's default is 4.
    request = make_request(2341, hidden_size=7168)
    duck = connect(start_server().endpoint)
    reply = duck.send(request).wait()
    assert reply.partial.nbytes > 32 * 2**20
    np.testing.assert_array_equal(reply.partial, echo(request, "bf16"))


def test_a_message_beyond_the_limit_is_refused_with_the_knob(start_server, connect):
    server = start_server(max_message_bytes=10_000)
    with pytest.raises(DuckProtocolError, match="--max-message-mib"):
        connect(server.endpoint).send(make_request(1000)).wait()
    connect(server.endpoint).send(make_request(1)).wait()


def test_a_wrong_request_is_refused_and_the_stream_goes_on(start_server, connect):
    duck = connect(start_server().endpoint)
    bad = duck.send(make_request(layer_idx=77))
    good = duck.send(make_request())
    with pytest.raises(DuckShapeError, match=r"refused a request .*: no layer 77"):
        bad.wait()
    good.wait()


def test_a_request_that_does_not_fit_itself_gets_a_status(start_server):
    wrong = duck_pb2.ForwardRequest(request_id=5, num_rows=9)
    with grpc.insecure_channel(start_server().endpoint) as channel:
        stub = duck_pb2_grpc.DuckStub(channel)
        (reply,) = stub.Forward(iter([wrong]), timeout=WAIT_S)
    assert (reply.request_id, reply.status) == (5, duck_pb2.STATUS_INVALID_REQUEST)
    assert "reply_dtype must be" in reply.error


def test_bytes_that_do_not_parse_end_only_their_own_stream(start_server, connect):
    server = start_server()
    with grpc.insecure_channel(server.endpoint) as channel:
        replies = channel.stream_stream(FORWARD_METHOD)(iter([b"\xff"]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(replies)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected a duck.v1.ForwardRequest" in caught.value.details()
    connect(server.endpoint).send(make_request()).wait()


def test_a_kernel_that_fails_is_an_error_of_that_call_alone(start_server, connect):
    calls = iter([RuntimeError("out of ducks"), None])

    def fail_once(request, reply_dtype):
        error = next(calls)
        if error is not None:
            raise error
        return echo(request, reply_dtype)

    duck = connect(start_server(fail_once).endpoint)
    with pytest.raises(DuckUnavailable, match="INTERNAL.*RuntimeError: out of ducks"):
        duck.send(make_request()).wait()
    duck.send(make_request()).wait()


@pytest.mark.parametrize(
    "wrong", [np.zeros((1, 1)), np.zeros((32, 3), np.uint16).T], ids=["form", "order"]
)
def test_a_kernel_with_a_wrong_result_is_an_error(start_server, connect, wrong):
    duck = connect(start_server(lambda request, dtype: wrong).endpoint)
    with pytest.raises(DuckUnavailable, match="the kernel must return"):
        duck.send(make_request()).wait()


def test_the_deadline_raises_duck_timeout_and_the_stream_goes_on(start_server, connect):
    gate = Gate()
    duck = connect(start_server(gate).endpoint, deadline_s=0.1)
    late = duck.send(make_request())
    with pytest.raises(DuckTimeout, match="did not answer within deadline_s=0.1"):
        late.wait()
    gate.may_end.set()

    def is_answered():
        try:
            return duck.send(make_request()).wait()
        except DuckTimeout:  # a slow machine may need more than one try
            return False

    wait_until(is_answered)


def test_a_reply_that_is_there_is_no_timeout_for_any_thread(start_server, connect):
    duck = connect(start_server().endpoint, deadline_s=WAIT_S)
    pending = duck.send(make_request())
    pending.wait()
    pending._deadline_s = 0.0
    with futures.ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(pending.wait) for _ in range(4000)]:
            result.result()


def test_a_server_that_stops_at_once_fails_the_calls_in_flight(start_server, connect):
    gate = Gate()
    server = start_server(gate)
    duck = connect(server.endpoint)
    pendings = [duck.send(make_request()) for _ in range(3)]
    assert gate.has_begun.wait(WAIT_S)
    stopper = threading.Thread(target=server.stop, args=(0,))
    stopper.start()
    for pending in pendings:
        with pytest.raises(DuckUnavailable, match=server.endpoint):
            pending.wait()
    gate.may_end.set()
    stopper.join()
    with pytest.raises(DuckUnavailable, match=server.endpoint):
        duck.send(make_request()).wait()


def test_a_server_that_stops_answers_what_has_arrived(start_server, connect):
    gate = Gate()
    server = start_server(gate)
    duck = connect(server.endpoint)
    pending = duck.send(make_request())
    assert gate.has_begun.wait(WAIT_S)
    stopper = threading.Thread(target=server.stop, args=(30,))
    stopper.start()
    gate.may_end.set()
    pending.wait()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()


def test_closing_the_client_fails_the_calls_in_flight(start_server, connect):
    gate = Gate()
    duck = connect(start_server(gate).endpoint)
    pending = duck.send(make_request())
    assert gate.has_begun.wait(WAIT_S)
    duck.close()
    gate.may_end.set()
    with pytest.raises(DuckUnavailable, match="the client was closed"):
        pending.wait()
    with pytest.raises(DuckUnavailable, match="the client was closed"):
        duck.send(make_request())


def test_raw_garbage_on_the_port_does_not_disturb_the_duck(start_server, connect):
    server = start_server()
    host, _, port = server.endpoint.rpartition(":")
    rng = np.random.default_rng(0)
    http2_preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for prefix in (b"", b"GET / HTTP/1.1\r\n\r\n", http2_preface):
        for _ in range(20):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
                raw.sendall(prefix + rng.bytes(200))
    connect(server.endpoint).send(make_request()).wait()


def test_calls_beyond_the_limit_are_refused_and_the_others_go_on(
    start_server, connect, monkeypatch
):
    monkeypatch.setattr(server_module, "MAX_CONCURRENT_CALLS", 1)
    server = start_server()
    first, second = (connect(server.endpoint) for _ in range(2))
    first.send(make_request()).wait()
    with pytest.raises(DuckProtocolError, match="the number of the calls"):
        second.send(make_request()).wait()
    first.send(make_request()).wait()


def test_two_hosts_share_one_duck(start_server, connect):
    server = start_server()
    ducks = [connect(server.endpoint, reply_dtype="fp32") for _ in range(2)]
    requests = [make_request(seed=seed) for seed in range(2)]
    pendings = [
        duck.send(request) for duck, request in zip(ducks, requests, strict=True)
    ]
    for request, pending in zip(requests, pendings, strict=True):
        np.testing.assert_array_equal(pending.wait().partial, echo(request, "fp32"))


def test_a_stock_client_from_the_proto_is_served(start_server):
    request = make_request()
    message = codec.encode_request(request, request_id=3, reply_dtype="fp32")
    with grpc.insecure_channel(start_server().endpoint) as channel:
        stub = duck_pb2_grpc.DuckStub(channel)
        info = stub.Describe(duck_pb2.DescribeRequest(), timeout=WAIT_S)
        wire = duck_pb2.ForwardRequest.FromString(message)
        # Serialized anew, the bytes may be others.
        wire.ClearField("checksum")
        (reply,) = stub.Forward(iter([wire]), timeout=WAIT_S)
    assert info.model_fingerprint == "f00d"
    assert (reply.request_id, reply.status) == (3, duck_pb2.STATUS_OK)
    assert reply.partial == echo(request, "fp32").tobytes()


def test_health_says_serving_until_the_server_stops(start_server, describer):
    server = start_server()
    assert describer(server.endpoint).health() == "SERVING"
    with grpc.insecure_channel(server.endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    server.stop(0)
    with pytest.raises(DuckUnavailable, match="cannot be reached"):
        describer(server.endpoint).health()


def test_reflection_lists_the_duck_service(start_server):
    with grpc.insecure_channel(start_server().endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([request]), timeout=WAIT_S)
    names = {service.name for service in reply.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


def test_a_taken_port_is_a_config_error(start_server):
    endpoint = start_server().endpoint
    with pytest.raises(DuckConfigError, match=f"cannot listen on {endpoint}"):
        start_server(listen=endpoint)


def test_a_socket_in_a_missing_directory_is_a_config_error(start_server, tmp_path):
    with pytest.raises(DuckConfigError, match="cannot listen on unix:.*missing"):
        start_server(listen=f"unix:{tmp_path}/missing/duck")
