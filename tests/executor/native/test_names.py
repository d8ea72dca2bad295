"""Host names: who knows them, and which of their addresses is taken."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from testing.ducks.wire_peers import BOTH_CLIENTS, SERVERS, serving
from vllm_duck.executor.wire.addresses import grpc_target, unix_target

_CALL = """
import sys
from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import check_echo
from vllm_duck.errors import DuckError
from vllm_duck.executor.fleet import Fleet
try:
    with Fleet.connect([sys.argv[1]], transport=sys.argv[2], deadline_s=600) as fleet:
        check_echo(fleet, make_request())
except DuckError as error:
    sys.exit(str(error))
"""

_SERVE = """
import sys
from testing.ducks.wire_peers import serving
from vllm_duck.cli import main
from vllm_duck.executor.wire.security import ServerSecurity
# A name that is not localhost is the network.
security = ServerSecurity(is_insecure=True)
with serving(sys.argv[1], listen="duck.test:0", security=security) as server:
    sys.exit(main(["status", server.endpoint]))
"""


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    """A library that makes the system know duck.test."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("names") / "names.so"
    source = Path(__file__).parent / "names.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def _run(names, arguments, addresses):
    preload = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(names)]))
    settings = {
        "LD_PRELOAD": preload,
        "DUCK_TEST_ADDRESSES": addresses,
        # gRPC's core tells of connections that a stopping server ends.
        "GRPC_VERBOSITY": "ERROR",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )


@contextmanager
def _silent(address, port):
    """Drops every SYN, as a machine that is off: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex((address, port))
        with socket.socket() as probe:
            probe.settimeout(0.3)
            with pytest.raises(TimeoutError):
                probe.connect((address, port))
        yield


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize(
    "addresses",
    ["127.0.0.1", "127.0.0.2 127.0.0.1", "::1 127.0.0.1", "127.0.0.2 ::1 127.0.0.1"],
)
def test_a_name_that_dns_does_not_know_is_called_where_it_listens(
    names, client, addresses
):
    """Nobody listens on the addresses before the last."""
    with serving(client, listen="127.0.0.1:0") as server:
        port = server.endpoint.rpartition(":")[2]
        done = _run(names, ["-c", _CALL, f"duck.test:{port}", client], addresses)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_an_address_that_answers_nothing_costs_no_call(names, client):
    with serving(client, listen="127.0.0.1:0") as server:
        port = server.endpoint.rpartition(":")[2]
        with _silent("127.0.0.2", int(port)):
            arguments = ["-c", _CALL, f"duck.test:{port}", client]
            done = _run(names, arguments, "127.0.0.2 127.0.0.1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", SERVERS)
def test_status_and_listen_know_the_same_names(names, kind):
    done = _run(names, ["-c", _SERVE, kind], "127.0.0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("duck.test:")


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_name_that_nobody_knows_is_named(names, client):
    done = _run(names, ["-c", _CALL, "other.test:1", client], "")
    assert "duck other.test:1 cannot be reached" in done.stderr
    assert "Name or service not known" in done.stderr


@pytest.mark.parametrize(
    ("addresses", "target"),
    [
        (["10.0.0.1"], "ipv4:10.0.0.1:7"),
        (["10.0.0.2", "10.0.0.1"], "ipv4:10.0.0.2:7,10.0.0.1:7"),
        (["fd00::1"], "ipv6:[fd00::1]:7"),
        (["fe80::1%eth0"], "ipv6:[fe80::1%25eth0]:7"),
        (["fd00::1", "10.0.0.1"], "ipv6:[fd00::1]:7,[::ffff:10.0.0.1]:7"),
    ],
)
def test_a_target_has_all_addresses_in_order(monkeypatch, addresses, target):
    def look_up(host, port, **_):
        assert host == "duck-a"
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert grpc_target("duck-a:7") == target


def test_a_socket_path_is_no_uri_for_grpc():
    assert unix_target("unix:/run/a b%41?#") == "unix:/run/a%20b%2541%3F%23"
