"""The seam to the host's compute: a second backend serves the bundled model too."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from testing.answers import ask, make_prompts, runner_of, start
from vllm_duck.errors import DuckConfigError
from vllm_duck.models import platforms
from vllm_duck.models.platforms import PLATFORMS, host_backend, host_platform
from vllm_duck.spec_decode.lanes.policy import LanePolicy

ROOT = Path(__file__).parent.parent.parent / "vllm_duck"


def test_only_the_cpu_backend_imports_its_kernels():
    importers = {
        path.relative_to(ROOT).parts[:2]
        for path in ROOT.rglob("*.py")
        if "import _host" in path.read_text()
    }
    # The doctor looks whether they are there.
    assert importers == {("models", "cpu"), ("cli", "doctor.py")}


def test_nothing_but_the_choice_of_the_backend_names_the_cpu_s():
    naming = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if "models.cpu" in path.read_text() and "cpu" not in path.parts
    }
    assert naming == {"models/platforms.py", "cli/doctor.py"}


@pytest.fixture(scope="module")
def cpu(engines, tiny_model):
    return start(tiny_model, speculates=False)


@pytest.fixture(scope="module")
def plain_torch(tiny_model, cpu):
    with pytest.MonkeyPatch.context() as patch:
        plain = replace(PLATFORMS["cpu"], backend="testing.torch_backend.TorchBackend")
        patch.setitem(PLATFORMS, "cpu", plain)
        llm = start(tiny_model, speculates=True)
    runner_of(llm).lanes.policy = LanePolicy(True, times=None)
    return llm


@pytest.mark.vllm
def test_a_backend_in_plain_torch_gives_the_same_tokens(cpu, plain_torch, tiny_model):
    """Drafts and lanes on, and prompts longer than index_topk; up to near-ties.

    One rounds rows to bf16 from layer to layer and the other does not, so a logit moves
    by hundredths, and at a near-tie of router or indexer by tenths.
    """
    asked = make_prompts(tiny_model)
    expected = ask(cpu, asked, max_tokens=24, logprobs=5)
    got = ask(plain_torch, asked, max_tokens=24)
    num_same = 0
    for ours, other in zip(expected, got, strict=True):
        parted = next(
            (
                i
                for i, (a, b) in enumerate(
                    zip(ours.token_ids, other.token_ids, strict=True)
                )
                if a != b
            ),
            None,
        )
        num_same += parted is None
        if parted is not None:
            found = ours.logprobs[parted]
            gap = found[ours.token_ids[parted]][0] - found[other.token_ids[parted]][0]
            assert gap < 0.75, f"token {parted} differs by {gap}"
    assert num_same >= len(asked) // 2
    assert runner_of(plain_torch).lanes.meter.total.num_steps > 0


def test_the_runner_finds_a_cpu_model_by_default():
    rows = host_backend().enter(torch.ones(2, 4, dtype=torch.bfloat16))
    assert host_backend().leave(rows).shape == (2, 4)


def test_a_platform_without_a_host_is_refused_in_one_sentence(monkeypatch):
    gpu = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(platforms, "current_platform", gpu)
    match = r"computes on vLLM's platform cpu \(vllm_duck\[cpu\]\), got cuda; install"
    for ask_for in (host_platform, host_backend):
        with pytest.raises(DuckConfigError, match=match):
            ask_for()


# What reads a tensor's memory, so that it must lie in this machine's.
READS_MEMORY = re.compile(r"\.numpy\(\)|data_ptr\(\)")


def test_only_backends_read_the_memory_of_tensors():
    reading = {
        path.relative_to(ROOT).as_posix()
        for folder in ("models", "spec_decode")
        for path in (ROOT / folder).rglob("*.py")
        if READS_MEMORY.search(path.read_text())
        and not {"cpu", "cuda"} & set(path.parts)
    }
    # in_memory() copies from wherever they lie.
    assert reading == {"models/batch.py"}
