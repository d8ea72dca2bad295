"""Certificates that change under running ducks and hosts: what is there now counts."""

import ssl
from pathlib import Path

import pytest

from testing.ducks.certificates import LOOPBACK, Authority, Certificate, have_openssl
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import (
    NATIVE_TLS,
    calling,
    check_echo,
    needs_native_tls,
    serving,
)
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckUnavailable
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.wire.security import ClientSecurity

pytestmark = pytest.mark.skipif(
    not have_openssl(), reason="the openssl command is not installed"
)


def _shown(endpoint):
    """The certificate that a new connection gets."""
    address, port = endpoint.rsplit(":", 1)
    pem = ssl.get_server_certificate((address, int(port)), timeout=WAIT_S)
    return ssl.PEM_cert_to_DER_cert(pem)


def _der(certificate):
    return ssl.PEM_cert_to_DER_cert(Path(certificate.cert).read_text())


@needs_native_tls
def test_new_connections_get_the_certificate_that_is_there_now(tmp_path, caplog):
    authority = Authority(tmp_path)
    old = authority.sign("duck", LOOPBACK)
    old_der = _der(old)
    with (
        serving("native", security=old.server()) as running,
        calling("native", [running.endpoint], security=old.client()) as kept,
    ):
        check_echo(kept, make_request())
        Path(old.cert).write_text("no certificate")
        wait_until(
            lambda: (
                (_shown(running.endpoint) == old_der)
                and "cannot be used (tls_cert" in caplog.text
            )
        )
        renewed = authority.sign("duck", LOOPBACK)
        wait_until(lambda: _shown(running.endpoint) == _der(renewed))
        check_echo(kept, make_request())


@needs_native_tls
def test_a_host_reads_its_files_again_when_it_connects(
    tmp_path, duck, other_authority, caplog
):
    other = other_authority.sign("renewed", LOOPBACK)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Path(duck.ca).read_bytes())
    security = ClientSecurity.from_files(tls_ca=str(ca))
    with (
        serving("native", security=other.server()) as running,
        calling("native", [running.endpoint], security=security) as fan_out,
    ):
        with pytest.raises(DuckUnavailable, match="tls_ca must be"):
            fan_out.send(make_request()).wait()
        ca.write_text("no certificate")

        def is_said():
            with pytest.raises(DuckUnavailable, match="tls_ca must be"):
                fan_out.send(make_request()).wait()
            return "cannot be used (tls_ca" in caplog.text

        wait_until(is_said)
        ca.write_bytes(Path(other.ca).read_bytes())

        def is_let_in():
            try:
                check_echo(fan_out, make_request())
            except DuckUnavailable:
                return False
            return True

        wait_until(is_let_in)


@pytest.mark.parametrize("server", [NATIVE_TLS, "grpcio"])
def test_a_duck_is_looked_for_with_the_files_that_are_there_now(
    server, tmp_path, authority, other_authority
):
    """Else a host that renewed them would not find its lost duck again."""
    duck = authority.sign("looked", LOOPBACK)
    files = {name: tmp_path / name for name in ("cert", "key", "ca")}

    def put(certificate):
        for name, file in files.items():
            file.write_bytes(Path(getattr(certificate, name)).read_bytes())

    put(other_authority.sign("former"))
    shown = Certificate(**{name: str(file) for name, file in files.items()})
    security = shown.client(shows=True)
    with serving(server, security=duck.server(asks_hosts=True)) as running:
        describer = GrpcDescriber(running.endpoint, security=security)
        with pytest.raises(DuckUnavailable, match="tls_ca must be the authority"):
            describer.describe()
        put(authority.sign("renewed"))
        describer.describe()
        files["key"].unlink()
        with pytest.raises(DuckUnavailable, match="tls_ca must be the authority"):
            describer.describe()
