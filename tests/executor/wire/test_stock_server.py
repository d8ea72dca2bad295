"""Clients against a plain grpcio server: what it may answer, and how it may end."""

from concurrent import futures

import grpc
import numpy as np
import pytest

from testing.ducks.mini_model import make_info, make_request
from testing.ducks.wire_peers import BOTH_CLIENTS, NATIVE, calling, check_echo, echo
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckProtocolError, DuckUnavailable
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.limits import SERVICE


@pytest.fixture
def stock_server():
    """Starts plain grpcio servers whose Forward is the given function."""
    servers = []

    def start(forward, **options):
        server = grpc.server(
            futures.ThreadPoolExecutor(8),
            options=list(options.pop("options", [])),
            **options,
        )
        handler = grpc.stream_stream_rpc_method_handler(_introducing(forward))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Forward": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0)


def _introducing(forward):
    """The same, after the headers that every duck sends."""

    def introduced(messages, context):
        identity = identity_of(make_info())
        context.send_initial_metadata((("duck-identity", identity),))
        return forward(messages, context)

    return introduced


def _answer(message):
    decoded = codec.decode_request(message)
    partial = echo(decoded.request, decoded.reply_dtype)
    return codec.encode_reply(
        partial, request_id=decoded.request_id, queue_us=0, compute_us=0
    )


def _echo_all(messages, context):
    return map(_answer, messages)


@pytest.mark.parametrize("client", [NATIVE])
def test_connections_that_a_server_ends_for_their_age_are_replaced(
    stock_server, client
):
    peers = set()

    def echo_and_count(messages, context):
        peers.add(context.peer())
        return _echo_all(messages, context)

    # Long enough for a call on a busy machine: one is sent three times at most.
    endpoint = stock_server(
        echo_and_count,
        options=[
            ("grpc.max_connection_age_ms", 500),
            ("grpc.max_connection_age_grace_ms", int(1000 * WAIT_S)),
        ],
    )
    with calling(client, [endpoint]) as fan_out:
        seed = 0
        while len(peers) < 4:
            seed += 1
            requests = [make_request(seed=2 * seed + i) for i in range(2)]
            pendings = [fan_out.send(request) for request in requests]
            for request, pending in zip(requests, pendings, strict=True):
                np.testing.assert_array_equal(
                    pending.wait().total, bf16_to_f32(request.hidden)
                )


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, DuckProtocolError, "--max-message-mib"),
        (grpc.StatusCode.UNIMPLEMENTED, DuckProtocolError, "is not a duck"),
        (grpc.StatusCode.UNAUTHENTICATED, DuckProtocolError, "refused the token"),
        (grpc.StatusCode.INVALID_ARGUMENT, DuckProtocolError, "refused a message"),
        (grpc.StatusCode.DATA_LOSS, DuckProtocolError, "got a damaged message"),
        (grpc.StatusCode.UNAVAILABLE, DuckUnavailable, "cannot be reached or went"),
        (grpc.StatusCode.INTERNAL, DuckProtocolError, "did not answer as a duck"),
    ],
)
def test_the_status_that_ends_a_stream_is_named_with_its_text(
    stock_server, client, code, error, match
):
    def abort(messages, context):
        next(messages)
        context.abort(code, "because: 100% of é")

    with calling(client, [stock_server(abort)]) as fan_out:
        pending = fan_out.send(make_request())
        with pytest.raises(error, match=f"{match}.*{code.name}: because: 100% of é"):
            pending.wait()


@pytest.mark.parametrize("client", [NATIVE])
def test_compressed_replies_are_refused_by_name(stock_server, client):
    endpoint = stock_server(_echo_all, compression=grpc.Compression.Gzip)
    with calling(client, [endpoint]) as fan_out:
        pending = fan_out.send(make_request(64, hidden_size=512))
        with pytest.raises(DuckProtocolError, match="compress"):
            pending.wait()


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda partial: partial[:1], r"\[1, 32\] in 64"),
        # It would broadcast.
        (lambda partial: partial[:1, :1], r"\[1, 1\] in 2"),
        (bf16_to_f32, r"\[3, 32\] in 384"),
    ],
    ids=["rows", "one number", "dtype"],
)
def test_a_reply_of_another_form_is_a_protocol_error(stock_server, client, change, got):
    def changed(messages, context):
        for message in messages:
            decoded = codec.decode_request(message)
            partial = change(echo(decoded.request, decoded.reply_dtype))
            yield codec.encode_reply(
                np.ascontiguousarray(partial),
                request_id=decoded.request_id,
                queue_us=0,
                compute_us=0,
            )

    with calling(client, [stock_server(changed)]) as fan_out:
        match = rf"expected a partial sum of shape \[3, 32\] in 192 bytes, got {got}"
        with pytest.raises(DuckProtocolError, match=match):
            fan_out.send(make_request()).wait()


@pytest.mark.parametrize("client", [NATIVE])
def test_a_reply_larger_than_any_that_is_owed_is_refused_before_it_is_read(
    stock_server, client
):
    def flood(messages, context):
        next(messages)
        yield bytes(200_000_000)

    with calling(client, [stock_server(flood)]) as fan_out:
        match = "expected a reply of at most .* bytes, got one of 200000000"
        with pytest.raises(DuckProtocolError, match=match):
            fan_out.send(make_request()).wait()


@pytest.mark.parametrize("client", [NATIVE])
def test_replies_to_nobody_are_dropped(stock_server, client):
    def twice(messages, context):
        for message in messages:
            yield _answer(message)
            yield _answer(message)

    with calling(client, [stock_server(twice)]) as fan_out:
        for seed in range(20):
            check_echo(fan_out, make_request(seed=seed))
