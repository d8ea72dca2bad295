"""Threads that work together: a share that throws leaves no other one behind."""

import os
import subprocess
from pathlib import Path

from testing.waiting import WAIT_S

CSRC = Path(__file__).parents[3] / "vllm_duck" / "csrc"


def test_an_exception_waits_for_all_shares_and_then_is_the_caller_s(tmp_path):
    program = tmp_path / "pool_checks"
    checks = Path(__file__).with_name("pool_checks.cpp")
    sources = [str(checks), str(CSRC / "base" / "pool.cpp")]
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
