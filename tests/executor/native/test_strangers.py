"""Connections without the token cannot keep out a host that has it."""

import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testing.compiled import run_checks
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, check_echo, needs_native, serving
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckError
from vllm_duck.executor.wire.security import ServerSecurity

pytestmark = needs_native

TOKEN = "of the hosts"
MAX_STRANGERS = 32
MAX_CALLS = 64


@pytest.fixture(scope="module")
def server():
    with serving("native", security=ServerSecurity(token=TOKEN)) as running:
        yield running


def _host(server, token=TOKEN):
    return calling("native", [server.endpoint], token=token)


def _connect(server):
    address, port = server.endpoint.rsplit(":", 1)
    connection = socket.create_connection((address, int(port)), timeout=WAIT_S)
    connection.setblocking(False)
    return connection


def _is_closed(connection):
    """Whether the duck has ended it; what it says before does not count."""
    with suppress(BlockingIOError):
        while True:
            try:
                if not connection.recv(4096):
                    return True
            except ConnectionError:
                return True
    return False


def test_silent_connections_do_not_keep_a_host_out(server):
    with ExitStack() as stack:
        old = stack.enter_context(_host(server))
        check_echo(old, make_request())
        others = [stack.enter_context(closing(_connect(server))) for _ in range(300)]
        check_echo(stack.enter_context(_host(server)), make_request())
        # Who was here before has lost nothing.
        check_echo(old, make_request(2))
        wait_until(lambda: sum(map(_is_closed, others)) >= 300 - MAX_STRANGERS)
        assert not _is_closed(others[-1])


def test_health_checks_take_no_host_s_calls(server):
    with ExitStack() as stack:
        refused = []
        # Channels to one server share a connection unless told otherwise.
        for number in range(MAX_CALLS // 4 + 4):
            options = [("grpc.use_local_subchannel_pool", 1), ("duck.number", number)]
            channel = stack.enter_context(
                grpc.insecure_channel(server.endpoint, options=options)
            )
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(4):
                watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert next(watching).status
                stack.callback(watching.cancel)
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
            refused.append(caught.value.code())
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        check_echo(stack.enter_context(_host(server)), make_request())


def test_a_wrong_token_makes_nobody_a_host(server):
    with ExitStack() as stack:
        for _ in range(MAX_STRANGERS + 8):
            wrong = stack.enter_context(_host(server, token="another"))
            with pytest.raises(DuckError, match="token"):
                wrong.send(make_request()).wait()
        check_echo(stack.enter_context(_host(server)), make_request())


def test_who_shows_no_right_in_time_is_late(tmp_path):
    """By a clock of the test's own."""
    checks = Path(__file__).with_name("strangers_checks.cpp")
    assert run_checks(checks, tmp_path) == "ok"
