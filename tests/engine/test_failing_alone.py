"""A test that fails, or an engine that does not start, takes no other module along.

In a run of pytest of its own, over two small modules; the second must pass.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.waiting import WAIT_S

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]

FAILING = """
import pytest
from testing.answers import start

@pytest.fixture(scope="module")
def llm(engines, tiny_model):
    return start(tiny_model, speculates=False)

def test_that_fails(llm):
    pytest.fail("on purpose")

def test_whose_start_fails_with_its_ducks_up(engines, tiny_model):
    start(tiny_model, speculates=False, kv_cache_memory_bytes=4096)
"""

PASSING = """
import os, sys
from pathlib import Path
import pytest
import torch
from testing.answers import ask, start

@pytest.fixture(scope="module")
def llm(engines, tiny_model):
    assert sys.last_traceback, "pytest holds what failed until the next test begins"
    assert not Path("/proc/self/task", str(os.getpid()), "children").read_text()
    assert not torch.distributed.is_initialized()
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    return start(tiny_model, speculates=True)

def test_that_passes(llm):
    assert ask(llm, [[5, 6, 7]])
"""


def test_a_failing_module_leaves_the_next_one_alone(tiny_model, tmp_path):
    (tmp_path / "test_first.py").write_text(FAILING)
    (tmp_path / "test_second.py").write_text(PASSING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = last")
    # Not what engines of this process have set.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:randomly"]
        + ["-p", "no:cacheprovider", "-c", tmp_path / "pytest.ini", "-rfp", tmp_path],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    for what in (
        "test_second.py::test_that_passes",
        "Failed: on purpose",
        "No available memory for the cache blocks",
    ):
        assert what in done.stdout
