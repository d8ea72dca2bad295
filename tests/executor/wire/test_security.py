"""Ducks are closed to the network unless something guards them."""

import logging
import subprocess

import pytest

from testing.ducks.mini_model import make_info, make_request
from testing.ducks.wire_peers import BOTH_CLIENTS, SERVERS, calling, serving
from vllm_duck.errors import (
    DuckConfigError,
    DuckError,
    DuckProtocolError,
    DuckUnavailable,
)
from vllm_duck.executor.grpcio.client import GrpcDuck
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.wire.codec import ReplyStatus
from vllm_duck.executor.wire.errors import error_of_reply, error_of_status
from vllm_duck.executor.wire.security import ClientSecurity, ServerSecurity, read_token


def _zeros(request, reply_dtype):
    return request.hidden * 0


def _call(endpoint, security):
    duck = GrpcDuck(endpoint, security=security)
    try:
        GrpcDescriber(endpoint, security=security).describe()
        return duck.send(make_request()).wait()
    finally:
        duck.close()


@pytest.fixture
def start_server():
    servers = []

    def start(security, listen="localhost:0"):
        server = DuckServer(_zeros, make_info(), listen=listen, security=security)
        servers.append(server)
        server.start()
        return server.endpoint

    yield start
    for server in servers:
        server.stop(0)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A self-signed certificate for localhost: its own authority."""
    directory = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    )
    try:
        subprocess.run(command.split(), cwd=directory, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return directory


def test_listening_to_the_network_needs_a_guard():
    match = "listening on 0.0.0.0:0 opens the duck to the network: give --tls-cert"
    with pytest.raises(DuckConfigError, match=match):
        DuckServer(_zeros, make_info(), listen="0.0.0.0:0")


@pytest.mark.parametrize(
    "security",
    [
        ServerSecurity(token="secret"),
        ServerSecurity(tls_cert=b"c", tls_key=b"k"),
        ServerSecurity(is_insecure=True),
    ],
)
def test_a_guard_or_the_users_word_opens_the_network(security):
    security.check_listen("0.0.0.0:7100")


def test_the_right_token_is_let_in(start_server):
    endpoint = start_server(ServerSecurity(token="secret"))
    _call(endpoint, ClientSecurity(token="secret"))


@pytest.mark.parametrize("token", [None, "Secret", "secret2"])
def test_a_wrong_or_missing_token_is_refused(start_server, token):
    endpoint = start_server(ServerSecurity(token="secret"))
    with pytest.raises(DuckProtocolError, match="give both sides the same token_file"):
        _call(endpoint, ClientSecurity(token=token))


def test_a_stream_without_the_token_is_refused(start_server):
    duck = GrpcDuck(start_server(ServerSecurity(token="secret")))
    with pytest.raises(DuckProtocolError, match="refused the token"):
        duck.send(make_request()).wait()
    duck.close()


def test_health_needs_no_token(start_server):
    endpoint = start_server(ServerSecurity(token="secret"))
    assert GrpcDescriber(endpoint).health() == "SERVING"


def test_tls_with_the_right_authority_works(start_server, certificates):
    server = ServerSecurity.from_files(
        tls_cert=str(certificates / "cert.pem"), tls_key=str(certificates / "key.pem")
    )
    client = ClientSecurity.from_files(tls_ca=str(certificates / "cert.pem"))
    _call(start_server(server), client)


def test_a_certificate_of_another_name_is_refused(start_server, certificates):
    """Although the channel is given addresses, the name counts."""
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    server = ServerSecurity.from_files(tls_cert=cert, tls_key=key)
    port = start_server(server).rpartition(":")[2]
    with pytest.raises(DuckUnavailable, match="127.0.0.1:.* cannot be reached"):
        _call(f"127.0.0.1:{port}", ClientSecurity.from_files(tls_ca=cert))


def test_mutual_tls_asks_the_host_for_a_certificate(start_server, certificates):
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    endpoint = start_server(
        ServerSecurity.from_files(tls_cert=cert, tls_key=key, tls_ca=cert)
    )
    _call(
        endpoint,
        ClientSecurity.from_files(tls_ca=cert, tls_cert=cert, tls_key=key),
    )
    with pytest.raises(DuckUnavailable, match=f"duck {endpoint} cannot be reached"):
        _call(endpoint, ClientSecurity.from_files(tls_ca=cert))


def test_a_client_without_tls_cannot_reach_a_duck_with_it(start_server, certificates):
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    endpoint = start_server(ServerSecurity.from_files(tls_cert=cert, tls_key=key))
    with pytest.raises(DuckUnavailable, match=f"duck {endpoint} cannot be reached"):
        _call(endpoint, ClientSecurity())


def test_a_certificate_that_is_none_is_a_config_error(start_server):
    with pytest.raises(DuckConfigError, match="cannot listen on localhost:0"):
        start_server(ServerSecurity(tls_cert=b"c", tls_key=b"k"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ClientSecurity(tls_cert=b"c"), "tls_cert and tls_key must be given"),
        (lambda: ClientSecurity(tls_cert=b"c", tls_key=b"k"), "tls_cert needs tls_ca"),
        (lambda: ServerSecurity(tls_cert=b"c"), "--tls-cert and --tls-key must be"),
        (lambda: ServerSecurity(tls_ca=b"c"), "--tls-ca needs --tls-cert"),
        (
            lambda: ClientSecurity.from_files(tls_ca="/nowhere"),
            "cannot read tls_ca /nowhere: No such file",
        ),
    ],
)
def test_half_a_security_is_refused(make, match):
    with pytest.raises(DuckConfigError, match=match):
        make()


def test_a_peer_s_words_stay_one_line_without_control_characters():
    """Logs and terminals show them."""
    words = "first\nduck: all is well\x1b[2J\u202e" + 10_000 * "x"
    for error in (
        error_of_status("d", 14, words),
        error_of_reply("d", ReplyStatus.INTERNAL, words),
    ):
        assert str(error).isprintable()
        assert "first duck: all is well" in str(error)
        assert len(str(error)) < 1200


def test_secrets_do_not_show_in_a_repr():
    security = ClientSecurity(tls_ca=b"hidden", token="hidden")
    assert "hidden" not in repr(security) + repr(ServerSecurity(token="hidden"))


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_tokens_are_in_no_log_and_no_error(server, client, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    right, wrong = "token-of-the-duck", "token-of-a-stranger"
    with serving(server, security=ServerSecurity(token=right)) as running:
        with calling(client, [running.endpoint], token=wrong) as fan_out:
            with pytest.raises(DuckError) as caught:
                fan_out.send(make_request()).wait()
            said = f"{caught.value!r} {fan_out!r} {running!r}"
        security = ClientSecurity(token=right)
        GrpcDescriber(running.endpoint, security=security).describe()
    said += caplog.text + "".join(capfd.readouterr())
    assert right not in said
    assert wrong not in said


def test_a_token_is_stripped(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    assert read_token(str(tmp_path / "token")) == "secret"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\n", "must hold one line of printable text, and is empty"),
        (b"a\nb", "must hold one line of printable text, and is not"),
        (b"\xff", "must be ASCII text"),
    ],
)
def test_a_token_file_that_cannot_be_a_token_is_refused(tmp_path, content, match):
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(DuckConfigError, match=match):
        read_token(str(tmp_path / "token"))
