"""The native stream is taken where it can serve, else grpcio, and the log says why."""

import importlib
from typing import get_args

import pytest

from testing.ducks.wire_peers import needs_native, needs_native_tls
from vllm_duck.config import TransportName
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.transports import TRANSPORTS, choose_transport


@pytest.fixture
def without_stream(monkeypatch):
    def hide(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", hide)


def choose(wanted, *, has_tls=False):
    """The name of the choice, and its reason."""
    choice = choose_transport(wanted, has_tls=has_tls)
    return choice.transport.name, choice.reason


def test_each_transport_of_the_table_can_be_asked_for():
    assert ("auto", *[each.name for each in TRANSPORTS]) == get_args(TransportName)


@needs_native
def test_auto_is_native_where_it_can_be_had():
    assert choose("auto") == ("native", "the native stream")
    assert choose("native") == ("native", "the native stream, as asked for")


@needs_native_tls
def test_auto_is_native_with_tls_too():
    assert choose("auto", has_tls=True) == ("native", "the native stream")


def test_grpcio_can_be_insisted_on():
    assert choose("grpcio") == ("grpcio", "grpcio, as asked for")


def test_a_stream_without_tls_leaves_tls_to_grpcio_and_says_so(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    assert choose("auto")[0] == "native"
    name, reason = choose("auto", has_tls=True)
    assert name == "grpcio"
    assert reason.startswith("grpcio, since TLS is on, and it was built without")
    assert "libssl-dev" in reason
    with pytest.raises(DuckConfigError, match="asked for, but TLS is on"):
        choose("native", has_tls=True)


def test_a_build_without_the_stream_says_so(without_stream):
    name, reason = choose("auto")
    assert name == "grpcio"
    assert "this build is without it (libnghttp2-dev was not" in reason
    with pytest.raises(DuckConfigError, match='ask for transport "auto" or "grpcio"'):
        choose("native")


def test_a_library_that_is_missing_at_run_time_is_named(monkeypatch):
    def fail(name):
        raise ImportError("libnghttp2.so.14: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert "cannot be loaded (libnghttp2.so.14: cannot open" in choose("auto")[1]
