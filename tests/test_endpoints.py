"""One form of endpoint on every side: what it takes, and what it refuses."""

import pytest

from vllm_duck.cli import main
from vllm_duck.config import DuckConfig
from vllm_duck.endpoints import (
    check_endpoint,
    is_local,
    parse_endpoints,
    split_host_port,
)
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.grpcio.client import GrpcDuck
from vllm_duck.executor.wire.security import ServerSecurity


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("unix:/run/duck", True),
        ("unix:/run/a b, c/duck", True),
        ("127.0.0.1:7100", True),
        ("127.8.8.8:7100", True),
        ("localhost:7100", True),
        ("[::1]:7100", True),
        ("0.0.0.0:7100", False),
        ("[::]:7100", False),
        ("[fe80::1%eth0]:7100", False),
        ("192.168.0.2:65535", False),
        ("duck-a:1", False),
        ("mini0.local:7100", False),
    ],
)
def test_what_counts_as_local(endpoint, expected):
    assert is_local(check_endpoint(endpoint)) is expected


# What a user may type, and none of it an endpoint.
_WRONG = [
    "",
    "duck",
    ":7100",
    "duck:",
    "duck:port",
    "duck:-1",
    "duck:+1",
    "duck:007100",
    "duck:１",  # noqa: RUF001
    "duck:7100 ",
    " duck:7100",
    "a:1 b:2",
    "a:1;b:2",
    "a:1,b:2",
    "a b:1",
    "a\n:1",
    "http://duck:7100",
    "dns:duck:7100",
    "ipv4:127.0.0.1:7100",
    "duck:7100/path",
    "user@duck:7100",
    "[duck]:7100",
    "[127.0.0.1]:7100",
    "[::1:7100",
    "::1]:7100",
    "[::1]7100",
    "[]:7100",
    "dück:7100",
]


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_port_beyond_the_last_is_refused_as_a_port(is_listening):
    with pytest.raises(DuckConfigError, match="a port from 1 to 65535, got 'a:65536'"):
        check_endpoint("a:65536", is_listening=is_listening)


@pytest.mark.parametrize("endpoint", _WRONG)
def test_an_endpoint_of_no_known_form_is_refused(endpoint):
    with pytest.raises(DuckConfigError, match="must be host:port or unix:/path, got"):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("::1:8131", r"\[::1\]:8131"),
        ("fe80::2:7100", r"\[fe80::2\]:7100"),
        ("::1", r"\[::1\]:PORT|\[::\]:1"),
        ("1:2:3:4:5:6:7:8", r"\[1:2:3:4:5:6:7:8\]:PORT"),
        ("1:2:3:4:5:6:7:8:9", r"\[1:2:3:4:5:6:7:8\]:9"),
    ],
)
def test_an_ipv6_address_without_brackets_is_refused_and_they_are_shown(
    endpoint, shown
):
    with pytest.raises(DuckConfigError, match=f"in brackets, as in ({shown}), got"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["unix:duck", "unix:", "unix:/run/a\nb"])
def test_a_socket_needs_an_absolute_path(endpoint):
    with pytest.raises(DuckConfigError, match="must have an absolute path"):
        check_endpoint(endpoint)


def test_a_socket_path_has_as_many_bytes_as_the_system_takes():
    longest = "unix:/" + "ä" * 53
    assert check_endpoint(longest) == longest
    match = "at most 107 bytes, got 108 in .*; choose a shorter directory with --listen"
    with pytest.raises(DuckConfigError, match=match):
        check_endpoint(longest + "x")


def test_port_0_is_for_listening_alone():
    assert check_endpoint("duck:0", is_listening=True) == "duck:0"
    with pytest.raises(DuckConfigError, match="port 0, for any free one, is for"):
        check_endpoint("duck:0")


@pytest.mark.parametrize(
    "refuse",
    [
        check_endpoint,
        parse_endpoints,
        GrpcDuck,
        ServerSecurity(is_insecure=True).check_listen,
        lambda endpoint: DuckConfig(endpoints=(endpoint,)),
        lambda endpoint: DuckConfig.from_settings(
            {}, {"VLLM_DUCK_ENDPOINTS": endpoint}
        ),
    ],
)
@pytest.mark.parametrize("endpoint", ["::1:8131", "a:1 b:2", "a:1;b:2", "a:0x1"])
def test_every_side_refuses_the_same(refuse, endpoint):
    with pytest.raises(DuckConfigError, match="brackets|must be host:port"):
        refuse(endpoint)


def test_a_list_is_separated_by_commas():
    text = "a:1, unix:/tmp/b,[::1]:2"
    assert parse_endpoints(text) == ("a:1", "unix:/tmp/b", "[::1]:2")
    assert parse_endpoints("") == ()


@pytest.mark.parametrize("text", ["a:1,b:2,", ",a:1", "a:1,,b:2", ",", " "])
def test_a_comma_too_many_is_refused_by_host_and_status(text, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_DUCK_ENDPOINTS", text)
    assert main(["status"]) == 1
    assert "must be separated by single commas" in capsys.readouterr().err
    with pytest.raises(DuckConfigError, match="must be separated by single commas"):
        DuckConfig.from_settings({}, {"VLLM_DUCK_ENDPOINTS": text})


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [("a:1", ("a", 1)), ("[::1]:2", ("::1", 2)), ("0.0.0.0:0", ("0.0.0.0", 0))],
)
def test_an_endpoint_falls_into_host_and_port(endpoint, parts):
    assert split_host_port(endpoint) == parts
