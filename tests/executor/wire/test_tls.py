"""TLS between every client and every server: who may call is let in, nobody else."""

import socket
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from testing.ducks.certificates import LOOPBACK, have_openssl
from testing.ducks.meddler import Meddler, flip
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import (
    NATIVE_TLS,
    calling,
    check_echo,
    has_native_tls,
    needs_native_tls,
    replies_of,
    serving,
)
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckConfigError, DuckUnavailable
from vllm_duck.executor.duck import MoeRequest
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.wire.security import ClientSecurity, ServerSecurity

if has_native_tls():
    from vllm_duck.executor.native.client import NativeFanOut
    from vllm_duck.executor.native.tls import server_tls

pytestmark = pytest.mark.skipif(
    not have_openssl(), reason="the openssl command is not installed"
)

ENDS = [NATIVE_TLS, "grpcio"]
CLIENTS = [*ENDS, "stock"]


@pytest.fixture(scope="module")
def host(authority):
    return authority.sign("host", "DNS:host")


def _large():
    rng = np.random.default_rng(0)
    return MoeRequest(
        layer_idx=2,
        hidden=rng.integers(0, 1 << 16, (2100, 7168), np.uint16),
        topk_ids=rng.integers(0, 4, (2100, 2), np.int32),
        topk_weights=rng.random((2100, 2), np.float32),
    )


def _refused(endpoint, security, match):
    """The native host says why, and of which duck."""
    with (
        calling("native", [endpoint], security=security) as fan_out,
        pytest.raises(DuckUnavailable, match=match) as caught,
    ):
        fan_out.send(make_request()).wait()
    assert endpoint in str(caught.value)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("server", ENDS)
def test_messages_of_every_size_come_back(server, client, duck):
    with (
        serving(server, security=duck.server()) as running,
        calling(client, [running.endpoint], security=duck.client()) as fan_out,
    ):
        requests = [make_request(rows, seed=rows) for rows in (1, 3, 1)] + [_large()]
        pendings = [fan_out.send(request) for request in requests]
        for request, pending in zip(requests, pendings, strict=True):
            (reply,) = replies_of(pending)
            assert reply.partial.tobytes() == request.hidden.tobytes()
        assert GrpcDescriber(running.endpoint, security=duck.client()).health()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("server", ENDS)
def test_mutual_tls_lets_a_host_with_a_certificate_in(server, client, duck, host):
    with serving(server, security=duck.server(asks_hosts=True)) as running:
        shown = host.client(shows=True)
        with calling(client, [running.endpoint], security=shown) as fan_out:
            check_echo(fan_out, make_request())


@needs_native_tls
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_name_or_an_address_must_be_in_the_certificate(name, duck, authority):
    with (
        serving("native", security=duck.server(), listen=f"{name}:0") as running,
        calling("native", [running.endpoint], security=duck.client()) as fan_out,
    ):
        check_echo(fan_out, make_request())
    wrong = authority.sign("wrong", "DNS:other,IP:127.0.0.2")
    with serving("native", security=wrong.server(), listen=f"{name}:0") as running:
        _refused(running.endpoint, wrong.client(), f"not for {name} .*--tls-cert")


@needs_native_tls
def test_a_unix_socket_is_localhost(duck, tmp_path):
    endpoint = f"unix:{tmp_path}/duck"
    with (
        serving("native", security=duck.server(), listen=endpoint),
        calling("native", [endpoint], security=duck.client()) as fan_out,
    ):
        check_echo(fan_out, make_request())


@needs_native_tls
@pytest.mark.parametrize("server", ENDS)
def test_a_host_without_a_certificate_is_told_what_to_set(server, duck):
    with serving(server, security=duck.server(asks_hosts=True)) as running:
        match = "certificate.*set tls_cert and tls_key"
        _refused(running.endpoint, duck.client(), match)


@needs_native_tls
def test_a_host_of_another_authority_is_refused(duck, other_authority):
    stranger = other_authority.sign("host")
    security = ClientSecurity.from_files(
        tls_ca=duck.ca, tls_cert=stranger.cert, tls_key=stranger.key
    )
    with serving("native", security=duck.server(asks_hosts=True)) as running:
        _refused(running.endpoint, security, "of the duck's --tls-ca")


@needs_native_tls
@pytest.mark.parametrize("server", ENDS)
def test_a_duck_of_another_authority_is_refused(server, duck, other_authority):
    other = other_authority.sign("host").client()
    with serving(server, security=duck.server()) as running:
        _refused(running.endpoint, other, "tls_ca must be the authority")


@needs_native_tls
def test_a_certificate_that_has_expired_is_refused(authority):
    old = authority.sign("old", LOOPBACK, is_expired=True)
    with serving("native", security=old.server()) as running:
        _refused(running.endpoint, old.client(), "expired.*renew the duck's --tls-cert")


@needs_native_tls
@pytest.mark.parametrize("server", ENDS)
def test_tls_at_the_host_alone_is_said(server, duck):
    with serving(server) as running:
        _refused(running.endpoint, duck.client(), "--tls-key, or leave out tls_ca")


@needs_native_tls
@pytest.mark.parametrize("server", ENDS)
def test_tls_at_the_duck_alone_is_said(server, duck):
    with serving(server, security=duck.server()) as running:
        _refused(running.endpoint, ClientSecurity(), "--tls-cert, set tls_ca")


@needs_native_tls
def test_a_port_that_says_nothing_is_no_hang(duck):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        fan_out = NativeFanOut(
            [endpoint],
            identities=[""],
            deadline_s=WAIT_S,
            reply_dtype="bf16",
            security=duck.client(),
            quiet_s=0.05,
        )
        with closing(fan_out), pytest.raises(DuckUnavailable, match="answer pings"):
            fan_out.send(make_request()).wait()


@pytest.fixture
def meddler(duck):
    with serving("native", security=duck.server()) as running:
        proxy = Meddler(running.endpoint)
        yield proxy
        proxy.close()


@needs_native_tls
@pytest.mark.parametrize("direction", ["to_host", "to_duck"])
def test_a_record_that_is_damaged_costs_the_connection_and_not_the_call(
    meddler, direction, duck
):
    # Far behind the handshake.
    setattr(meddler, direction, flip(9000))
    with calling("native", [meddler.endpoint], security=duck.client()) as fan_out:
        check_echo(fan_out, make_request(1, hidden_size=7168))
    assert meddler.num_connections == 2


@needs_native_tls
def test_requests_in_flight_survive_a_broken_connection(meddler, duck):
    with calling("native", [meddler.endpoint], security=duck.client()) as fan_out:
        check_echo(fan_out, make_request())
        meddler.passes_to_host.clear()
        pending = fan_out.send(make_request(2))
        meddler.cut()
        meddler.resume()
        (reply,) = replies_of(pending)
    assert reply.partial.tobytes() == make_request(2).hidden.tobytes()


@needs_native_tls
def test_half_a_handshake_keeps_no_host_out(duck, host):
    """Such connections are strangers: 32 at most, and the oldest gives way."""
    with serving("native", security=duck.server(asks_hosts=True)) as running:
        address, port = running.endpoint.rsplit(":", 1)
        with ExitStack() as stack:
            for number in range(300):
                other = socket.create_connection((address, int(port)), WAIT_S)
                stack.enter_context(closing(other))
                # The head of a record, some of a ClientHello, or nothing.
                other.sendall(b"\x16\x03\x01\x02\x00\x01\x00"[: number % 8])
            security = host.client(shows=True)
            fan_out = stack.enter_context(
                calling("native", [running.endpoint], security=security)
            )
            check_echo(fan_out, make_request())


@needs_native_tls
@pytest.mark.parametrize(
    ("kind", "content", "match"),
    [
        ("cert", "", "tls_cert /.*expected a certificate as PEM"),
        ("key", "", "tls_key /.*expected a key as PEM, without a password"),
        ("ca", "", "tls_ca /.*expected a certificate as PEM"),
        ("key", None, "tls_key /.*not that of tls_cert"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, authority, kind, content, match):
    good = authority.sign("good", LOOPBACK)
    wrong = tmp_path / "wrong.pem"
    other_key = Path(authority.sign("another").key).read_text()
    wrong.write_text(other_key if content is None else content)
    bad = replace(good, **{kind: str(wrong)})
    with pytest.raises(DuckConfigError, match=match):
        server_tls(bad.server(asks_hosts=True))


@needs_native_tls
def test_certificates_may_come_as_text(duck):
    security = ServerSecurity(
        tls_cert=Path(duck.cert).read_bytes(), tls_key=Path(duck.key).read_bytes()
    )
    with (
        serving("native", security=security) as running,
        calling("native", [running.endpoint], security=duck.client()) as fan_out,
    ):
        check_echo(fan_out, make_request())


@needs_native_tls
def test_calls_go_on_through_a_restart_of_the_duck(duck):
    with ExitStack() as stack:
        first = serving("native", security=duck.server())
        running = first.__enter__()
        fan_out = stack.enter_context(
            calling(
                "native", [running.endpoint], security=duck.client(), recover_s=WAIT_S
            )
        )
        check_echo(fan_out, make_request())
        first.__exit__(None, None, None)
        pending = fan_out.send(make_request())
        listen = running.endpoint
        stack.enter_context(serving("native", security=duck.server(), listen=listen))
        assert pending.wait().total.shape == make_request().hidden.shape


def _describe(endpoint, security):
    return GrpcDescriber(endpoint, security=security).describe()


@pytest.mark.parametrize("server", ENDS)
def test_the_first_question_to_a_duck_says_what_would_mend_tls(
    server, duck, authority, other_authority
):
    """It goes through grpcio, whatever carries the requests."""
    old = authority.sign("old", LOOPBACK, is_expired=True)
    wrong = authority.sign("wrong", "DNS:other")
    no_pem = ClientSecurity(tls_ca=b"no PEM")
    cases = [
        (duck.server(), other_authority.sign("host").client(), "tls_ca must be the"),
        (old.server(), old.client(), "renew the duck's --tls-cert"),
        (wrong.server(), wrong.client(), "--tls-cert must name its endpoint"),
        (
            duck.server(asks_hosts=True),
            duck.client(),
            "has --tls-ca, set tls_cert",
        ),
        (duck.server(), ClientSecurity(), "if the duck has --tls-cert, set tls_ca"),
        (duck.server(), no_pem, "tls_ca must hold a certificate as PEM"),
        (ServerSecurity(), duck.client(), "or leave out tls_ca"),
    ]
    for security, shown, match in cases:
        with (
            serving(server, security=security) as running,
            pytest.raises(DuckUnavailable, match=match),
        ):
            _describe(running.endpoint, shown)
