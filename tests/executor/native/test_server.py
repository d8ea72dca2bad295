"""The native server towards stock clients: one endpoint, every method, its limits."""

import errno
import os
import socket
import threading
import time
from contextlib import ExitStack, closing

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import encode_long_request, make_request
from testing.ducks.wire_peers import calling, needs_native, serving
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckConfigError, DuckProtocolError
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.wire import codec, duck_pb2, duck_pb2_grpc
from vllm_duck.executor.wire.limits import FORWARD_METHOD, SERVICE
from vllm_duck.executor.wire.security import ClientSecurity, ServerSecurity

pytestmark = needs_native


@pytest.fixture
def server():
    with serving("native") as running:
        yield running


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.endpoint) as opened:
        yield opened


def _message(seed=0, rows=1, hidden_size=32):
    request = make_request(rows, seed=seed, hidden_size=hidden_size)
    return codec.encode_request(request, request_id=7, reply_dtype="bf16")


def _forward(channel, messages, **options):
    return channel.stream_stream(FORWARD_METHOD)(
        iter(messages), timeout=WAIT_S, **options
    )


def _status_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def test_the_generated_stub_is_served(channel):
    request = make_request()
    wire = duck_pb2.ForwardRequest.FromString(_message(rows=3))
    wire.ClearField("checksum")
    stub = duck_pb2_grpc.DuckStub(channel)
    (reply,) = stub.Forward(iter([wire]), timeout=WAIT_S)
    assert (reply.request_id, reply.status) == (7, duck_pb2.STATUS_OK)
    assert reply.partial == request.hidden.tobytes()
    assert stub.Describe(duck_pb2.DescribeRequest(), timeout=WAIT_S).isa == "portable"


def test_a_stream_that_its_client_ends_ends_with_ok_after_all_replies(channel):
    replies = list(_forward(channel, [_message(seed) for seed in range(10)]))
    assert [codec.decode_reply(reply).request_id for reply in replies] == [7] * 10


def test_health_answers_for_the_duck_and_knows_no_other_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        request = health_pb2.HealthCheckRequest(service=service)
        reply = stub.Check(request, timeout=WAIT_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="cat"), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_who_watches_health_is_told_that_the_duck_stops(server, channel):
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=WAIT_S)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    stopper = threading.Thread(target=server.stop, args=(5,))
    stopper.start()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    stopper.join()


def test_reflection_lists_and_describes_the_service(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    names, file = stub.ServerReflectionInfo(iter(requests), timeout=WAIT_S)
    services = {service.name for service in names.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert b"ForwardRequest" in file.file_descriptor_response.file_descriptor_proto[0]


def test_a_method_that_is_not_there_is_unimplemented(channel):
    call = channel.unary_unary(f"/{SERVICE}/Quack")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_do_not_parse_end_only_their_own_stream(channel):
    code, details = _status_of(_forward(channel, [b"\xff"]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == (
        "expected a duck.v1.ForwardRequest, got 1 bytes that do not parse as one"
    )
    assert len(list(_forward(channel, [_message()]))) == 1


def test_a_wrong_checksum_is_data_loss(channel):
    damaged = bytearray(_message())
    damaged[20] ^= 1
    code, details = _status_of(_forward(channel, [bytes(damaged)]))
    assert code is grpc.StatusCode.DATA_LOSS
    assert "with a wrong checksum" in details


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_rows": 4}, "hidden of shape [4, 32] must have 256 bytes, got 192"),
        ({"hidden_size": 2**31}, "hidden of shape [3, 2147483648] must have"),
        ({"num_topk": 3}, "topk_ids of shape [3, 3] must have 36 bytes, got 24"),
        ({"topk_weights": b"1"}, "topk_weights of shape [3, 2] must have 24 bytes"),
        ({"num_rows": 2**32 - 1, "hidden_size": 2**32 - 1}, "hidden of shape"),
        ({"reply_dtype": 9}, "reply_dtype must be DTYPE_BF16 or DTYPE_F32, got 9"),
    ],
)
def test_a_request_that_does_not_fit_itself_is_refused_as_by_grpcio(
    channel, changes, match
):
    wire = duck_pb2.ForwardRequest.FromString(_message(rows=3))
    wire.ClearField("checksum")
    for name, value in changes.items():
        setattr(wire, name, value)
    stub = duck_pb2_grpc.DuckStub(channel)
    (reply,) = stub.Forward(iter([wire]), timeout=WAIT_S)
    assert (reply.request_id, reply.status) == (7, duck_pb2.STATUS_INVALID_REQUEST)
    assert match in reply.error
    assert reply.HasField("checksum")


def test_compressed_messages_are_unimplemented(server):
    with grpc.insecure_channel(
        server.endpoint, compression=grpc.Compression.Gzip
    ) as channel:
        code, details = _status_of(_forward(channel, [bytes(4000)]))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details == "a duck does not read compressed messages"


def test_a_message_beyond_the_limit_is_refused_before_it_is_read():
    with (
        serving("native", max_message_bytes=10_000) as server,
        grpc.insecure_channel(server.endpoint) as channel,
    ):
        code, details = _status_of(_forward(channel, [bytes(50_000_000)]))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 10000 bytes, got one of 50000000" in details
        assert len(list(_forward(channel, [_message()]))) == 1


def test_a_call_that_its_client_gives_up_leaves_the_duck_well(channel):
    hold = threading.Event()

    def messages():
        yield _message()
        hold.wait(WAIT_S)

    for _ in range(20):
        call = _forward(channel, messages())
        next(call)
        call.cancel()
    hold.set()
    assert len(list(_forward(channel, [_message()]))) == 1


def test_a_stock_client_with_a_deadline_gets_it(channel):
    hold = threading.Event()

    def messages():
        hold.wait(WAIT_S)
        yield b""

    call = channel.stream_stream(FORWARD_METHOD)(messages(), timeout=0.2)
    assert _status_of(call)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    hold.set()


def test_calls_beyond_64_are_refused_and_the_others_go_on(server):
    hold = threading.Event()

    def messages():
        yield _message()
        hold.wait(WAIT_S)

    def refusal(channel):
        code, details = _status_of(_forward(channel, [_message()]))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        return details

    with ExitStack() as stack:
        # One address has 48.
        elsewhere = stack.enter_context(
            closing(Meddler(server.endpoint, source="127.0.0.2"))
        )
        # A connection for each.
        options = [("grpc.use_local_subchannel_pool", 1)]
        endpoints = 3 * [server.endpoint] + 2 * [elsewhere.endpoint]
        channels = [
            stack.enter_context(grpc.insecure_channel(endpoint, options=options))
            for endpoint in endpoints
        ]
        calls = []
        for channel in channels[:4]:
            mine = [_forward(channel, messages()) for _ in range(16)]
            for call in mine:
                next(call)
            calls += mine
            if len(calls) < 64:
                assert refusal(channel) == "a connection has 16 calls at once"
        assert refusal(channels[4]) == "the duck serves 64 calls at once"
        hold.set()
        assert [list(call) for call in calls] == [[]] * 64


@pytest.mark.parametrize("token", ["secret", "secreT", None])
def test_only_the_token_opens_the_duck_and_health_stays_open(token):
    security = ServerSecurity(token="secret")
    with serving("native", security=security) as server:
        duck = GrpcDescriber(server.endpoint, security=ClientSecurity(token=token))
        assert duck.health() == "SERVING"
        with calling("native", [server.endpoint], token=token) as fan_out:
            if token == "secret":
                duck.describe()
                fan_out.send(make_request()).wait()
                return
            for call in (duck.describe, fan_out.send(make_request()).wait):
                with pytest.raises(DuckProtocolError, match="refused the token"):
                    call()


def test_raw_garbage_on_the_port_does_not_disturb_the_duck(server, channel):
    host, _, port = server.endpoint.rpartition(":")
    rng = np.random.default_rng(0)
    http2_preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for prefix in (b"", b"GET / HTTP/1.1\r\n\r\n", http2_preface):
        for _ in range(20):
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
                raw.sendall(prefix + rng.bytes(200))
    assert len(list(_forward(channel, [_message()]))) == 1


def test_a_host_that_reads_no_replies_holds_little_memory_and_nobody_up():
    message = encode_long_request()
    with serving("native", max_message_bytes=8 << 20) as server:
        meddler = Meddler(server.endpoint)
        before = resident_bytes()
        with grpc.insecure_channel(
            meddler.endpoint,
            options=[("grpc.max_receive_message_length", 8 << 20)],
        ) as channel:
            meddler.passes_to_host.clear()
            # 800 MB if all of it were taken.
            call = _forward(channel, (message for _ in range(200)))
            with calling("native", [server.endpoint]) as other:
                for seed in range(200):
                    other.send(make_request(seed=seed)).wait()
                    time.sleep(0.005)
            assert resident_bytes() - before < 300 << 20
            call.cancel()
        meddler.close()


def test_a_file_system_without_sockets_is_named_as_such(tmp_path, monkeypatch):
    def refuse(self, address):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    match = "Operation not supported; name a directory .* that has sockets"
    with (
        pytest.raises(DuckConfigError, match=match),
        serving("native", listen=f"unix:{tmp_path}/duck"),
    ):
        pass


def test_a_unix_socket_is_private_goes_away_and_may_be_left_over(tmp_path):
    path = tmp_path / "duck"
    listen = f"unix:{path}"
    # As a duck that was killed leaves it.
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(path))
    left_over.close()
    with serving("native", listen=listen) as server:
        with calling("native", [listen]) as fan_out:
            fan_out.send(make_request()).wait()
        assert path.stat().st_mode & 0o777 == 0o600
        with (
            pytest.raises(DuckConfigError, match=f"cannot listen on {listen}"),
            serving("native", listen=listen),
        ):
            pass
        assert server.endpoint == listen
    assert not path.exists()


@pytest.mark.parametrize("listen", ["localhost:0", "127.0.0.1:0", "[::1]:0"])
def test_names_and_both_families_are_listened_on(listen):
    try:
        running = serving("native", listen=listen)
        with running as server, calling("native", [server.endpoint]) as fan_out:
            assert not server.endpoint.endswith(":0")
            fan_out.send(make_request()).wait()
    except DuckConfigError as error:
        pytest.skip(f"no such address here: {error}")


def test_a_taken_port_is_a_config_error(server):
    match = f"cannot listen on {server.endpoint}"
    with (
        pytest.raises(DuckConfigError, match=match),
        serving("native", listen=server.endpoint),
    ):
        pass
