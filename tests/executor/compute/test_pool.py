"""Threads that work together: a share that throws leaves no other one behind."""

from pathlib import Path

from testing.compiled import CSRC, run_checks


def test_an_exception_waits_for_all_shares_and_then_is_the_caller_s(tmp_path):
    checks = Path(__file__).with_name("pool_checks.cpp")
    assert run_checks(checks, tmp_path, CSRC / "base" / "pool.cpp") == "ok"
