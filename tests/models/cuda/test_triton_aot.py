"""Every kernel compiles for GPUs that are not here, and is not worse than it was.

In a process of its own: this one has Triton's interpreter.
"""

import json
import os
import subprocess
import sys

import pytest

from testing.gpu.ahead import ARCHS, SHARED_LIMIT
from testing.gpu.cases import CASES

# All five take minutes: `make check-gpu`.
CHECKED = os.environ.get("VLLM_DUCK_GPU_ARCHS", "86 90").split()


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "testing.gpu.cases", *CHECKED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", CHECKED)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_keeps_to_its_limits(found, name, arch):
    case = CASES[name]
    kernels = found[f"{name} {arch}"]
    for measured, wide_loads in zip(kernels, case.least_wide_loads(), strict=True):
        assert measured["shared_bytes"] <= SHARED_LIMIT[int(arch)]
        assert measured["stack_bytes"] <= case.stack_bytes
        assert measured["byte_loads"] == 0
        assert measured["wide_loads"] >= wide_loads
        if case.per_weight is not None:
            assert 1 < measured["per_weight"] <= case.per_weight


def test_gemms_have_one_instruction_on_every_gpu(found):
    gemms = [
        measured
        for name, case in CASES.items()
        for arch in CHECKED
        for measured in found[f"{name} {arch}"]
        if case.per_weight is not None
    ]
    assert gemms
    assert not any(measured["uses_wgmma"] for measured in gemms)


def test_the_checked_gpus_are_known():
    assert {int(arch) for arch in CHECKED} <= set(ARCHS)
