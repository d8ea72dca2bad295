"""The memory of large messages and sums is used again, and not asked of the system."""

import os
import subprocess
import sys
from pathlib import Path

from testing.compiled import CSRC, run_checks
from testing.ducks.wire_peers import needs_native
from testing.waiting import WAIT_S

ROOT = Path(__file__).parents[3]


def run(command, **environ):
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def test_which_blocks_are_kept(tmp_path):
    checks = Path(__file__).with_name("block_checks.cpp")
    assert run_checks(checks, tmp_path, CSRC / "base" / "block.cpp") == "ok"


@needs_native
def test_a_call_like_the_one_before_takes_no_page_from_the_system():
    """A request and a reply of half a MiB at each end, and their sum, have 650."""
    num_faults = run(
        [sys.executable, "-m", "tests.executor.native.page_faults"],
        GLIBC_TUNABLES=f"glibc.malloc.mmap_threshold={64 << 10}",
    )
    assert int(num_faults) < 10
