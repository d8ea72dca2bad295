"""The ledger of what is used of vLLM: it is whole, and it would notice a change."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from scripts import check_vllm
from vllm_duck import vllm_seams
from vllm_duck.errors import DuckError
from vllm_duck.seam import Seam
from vllm_duck.vllm_seams import SEAMS, check_seams

INSTALLED = Path(importlib.util.find_spec("vllm").origin).parent.parent
BATCH = "vllm.v1.worker.gpu_input_batch"
SAMPLE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample"


def _seam(target, use, parameters="", bodies=()):
    return Seam(target, use, "a test", "never", parameters, bodies)


def test_the_installed_vllm_is_as_the_ledger_says():
    assert list(check_vllm.problems(INSTALLED)) == []
    check_seams()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (_seam(SAMPLE.replace("_sample", "_draw"), "override", "self"), "is gone"),
        (_seam(SAMPLE, "override", "self logits"), "takes"),
        (_seam(SAMPLE, "call", "self scores"), "takes"),
        (_seam(SAMPLE.replace("_sample", "no_mask"), "read"), "is gone"),
        (_seam("vllm.config.model:_NO_OVERRIDES", "read"), "is gone"),
    ],
)
def test_a_change_is_noticed_at_the_start_and_in_the_source(
    monkeypatch, changed, problem
):
    monkeypatch.setattr(vllm_seams, "SEAMS", (changed,))
    monkeypatch.setattr(check_vllm, "SEAMS", (changed,))
    with pytest.raises(DuckError, match=f"{changed.qualname} {problem}"):
        check_seams()
    (found,) = check_vllm.problems(INSTALLED)
    assert problem in found


def test_another_body_is_shown_as_a_difference(monkeypatch, tmp_path):
    (seam,) = [seam for seam in SEAMS if seam.target == SAMPLE]
    source = tmp_path.joinpath(*seam.module.split(".")).with_suffix(".py")
    source.parent.mkdir(parents=True)
    text = inspect.getsource(importlib.import_module(seam.module))
    source.write_text(text.replace("if spec_decode_metadata is None:", "if not 1:"))
    monkeypatch.setattr(check_vllm, "all_seams", lambda: [seam])
    (found,) = check_vllm.problems(tmp_path)
    assert "has another body" in found
    assert "+    if not 1:" in found
    # Layout and comments are none.
    source.write_text(text.replace("def _sample(", "def _sample(  # here\n        "))
    assert list(check_vllm.problems(tmp_path)) == []


def test_every_private_override_is_in_the_ledger():
    """What our subclasses of vLLM's classes override, but for vLLM's public seams."""
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from vllm_duck.spec_decode.proposer import DuckProposer
    from vllm_duck.spec_decode.runner import DuckModelRunner

    named = {seam.qualname.rpartition(".")[2] for seam in SEAMS}
    for ours, theirs in (
        (DuckModelRunner, CPUModelRunner),
        (DuckProposer, EagleProposer),
    ):
        overridden = {name for name in vars(ours) if hasattr(theirs, name)}
        overridden -= {name for name in vars(object)} | {"__module__"}
        assert overridden - {"__init__"} <= named


def test_what_the_runner_reads_of_the_batch_is_in_the_ledger():
    """But for what every model of vLLM reads."""
    source = inspect.getsource(importlib.import_module("vllm_duck.spec_decode.runner"))
    used = set(re.findall(r"\b(?:self\.input_batch|batch)\.(\w+)", source))
    batch = inspect.getsource(importlib.import_module(BATCH))
    of_vllm = {name for name in used if re.search(rf"self\.{name}\b", batch)}
    held = {seam.qualname.partition(".")[2] for seam in SEAMS if seam.module == BATCH}
    public = {"num_reqs", "req_ids", "sampling_metadata", "block_table"}
    assert of_vllm - public == held
