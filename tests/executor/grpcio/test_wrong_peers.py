"""grpcio's host at an endpoint where no duck, or no sound one, listens."""

import socket
import threading
from concurrent import futures

import grpc
import pytest

from testing.ducks.mini_model import make_request
from vllm_duck.errors import (
    DuckProtocolError,
    DuckUnavailable,
)
from vllm_duck.executor.wire.limits import SERVICE


def test_nobody_there_is_unavailable_with_the_endpoint(describer):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(DuckUnavailable, match=f"duck {endpoint} cannot be reached"):
            describer(endpoint).describe()


def test_a_grpc_server_that_is_no_duck_is_a_protocol_error(describer):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    match = f"duck 127.0.0.1:{port} speaks gRPC but is not a duck"
    with pytest.raises(DuckProtocolError, match=match):
        describer(f"127.0.0.1:{port}").describe()
    server.stop(0)


def test_something_that_is_no_grpc_is_unavailable_with_the_endpoint(describer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_as_http1():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer_as_http1, daemon=True).start()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DuckUnavailable, match=f"duck {endpoint} cannot be reached"):
            describer(endpoint).describe()


def test_a_peer_that_answers_garbage_is_a_protocol_error(connect, describer):
    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(lambda *_: b"\xff"),
        "Forward": grpc.stream_stream_rpc_method_handler(lambda *_: iter([b"\xff"])),
    }
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, handlers),)
    )
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with pytest.raises(DuckProtocolError, match="expected a duck.v1.DescribeReply"):
        describer(endpoint).describe()
    with pytest.raises(DuckProtocolError, match="expected a duck.v1.ForwardReply"):
        connect(endpoint).send(make_request()).wait()
    server.stop(0)
