"""A killed process's directory goes away with the next one; a living one's stays."""

import os
import signal
import subprocess
import sys
import time

import pytest

from vllm_duck.executor.system.temporary import temporary_directory

_MAKE = """
import sys
from vllm_duck.executor.system.temporary import temporary_directory
print(temporary_directory("duck-test-"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path, monkeypatch):
    """Another process with a directory of its own, an hour old."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", _MAKE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = process.stdout.readline().strip()
    (tmp_path / path / "socket").touch()
    hour_ago_s = time.time() - 3600
    os.utime(path, (hour_ago_s, hour_ago_s))
    yield process, tmp_path / path
    process.kill()
    process.communicate()


def test_what_a_killed_process_left_is_removed(owner):
    process, left = owner
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left.exists()
    made = temporary_directory("duck-test-")
    assert made.is_dir()
    assert not left.exists()


def test_what_a_living_process_has_stays(owner):
    _, theirs = owner
    ours = temporary_directory("duck-test-")
    os.utime(ours, (1, 1))
    temporary_directory("duck-test-")
    assert (theirs / "socket").exists()
    assert ours.is_dir()


def test_a_young_directory_without_a_lock_stays(owner, tmp_path):
    young = tmp_path / "duck-test-young"
    young.mkdir()
    temporary_directory("duck-test-")
    assert young.is_dir()
