"""The native stream is taken where it can serve, else grpcio, and the log says why."""

import importlib

import pytest

from testing.ducks.wire_peers import needs_native
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.wire.transport import choose_transport


@pytest.fixture
def without_stream(monkeypatch):
    def hide(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", hide)


@needs_native
def test_auto_is_native_where_it_can_be_had():
    assert choose_transport("auto", has_tls=False) == (True, "the native stream")
    assert choose_transport("native", has_tls=False).is_native


def test_grpcio_can_be_insisted_on():
    assert choose_transport("grpcio", has_tls=False) == (False, "grpcio, as asked for")


def test_tls_is_served_by_grpcio_and_said_so():
    choice = choose_transport("auto", has_tls=True)
    assert not choice.is_native
    assert choice.reason.startswith("grpcio, since TLS is on, which the native stream")
    with pytest.raises(DuckConfigError, match="asked for, but TLS is on"):
        choose_transport("native", has_tls=True)


def test_a_build_without_the_stream_says_so(without_stream):
    choice = choose_transport("auto", has_tls=False)
    assert not choice.is_native
    assert "this build is without it (libnghttp2-dev was not" in choice.reason
    with pytest.raises(DuckConfigError, match='ask for transport "auto" or "grpcio"'):
        choose_transport("native", has_tls=False)


def test_a_library_that_is_missing_at_run_time_is_named(monkeypatch):
    def fail(name):
        raise ImportError("libnghttp2.so.14: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    reason = choose_transport("auto", has_tls=False).reason
    assert "cannot be loaded (libnghttp2.so.14: cannot open" in reason
