"""Installed but off: vLLM serves a DeepSeek-V3 model as if vllm_duck were not there."""

import os

import pytest

from testing.answers import make_prompts
from testing.engines import greedy_tokens, in_fresh_process
from testing.oracle import write_dequantized

pytestmark = pytest.mark.vllm


def _answers(model_dir, prompts, *, plugins):
    """Greedy tokens, and the classes that vLLM chose for worker, runner and model."""
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins
    from testing import engines

    seen = {}
    start = engines.start_engine

    def started(*args, **kwargs):
        llm = start(*args, **kwargs)
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        runner = worker.model_runner
        for each in (worker, runner, runner.get_model(), runner.sampler):
            seen[type(each).__name__] = type(each).__module__
        seen["config"] = core.vllm_config.compute_hash()
        return llm

    engines.start_engine = started
    # What vLLM compiles is its own, and compiling takes minutes.
    options = {"max_num_seqs": 4, "enforce_eager": True}
    tokens = greedy_tokens(model_dir, prompts, 16, duck=None, **options)
    import sys

    return tokens, seen, "vllm_duck.worker" in sys.modules


def test_a_v3_model_without_duck_is_stock_vllm_s(tiny_model, tmp_path):
    import torch

    dense = write_dequantized(tiny_model, tmp_path, torch.bfloat16, as_dense_v3=True)
    prompts = make_prompts(tiny_model)[:4]
    without = in_fresh_process(_answers, dense, prompts, plugins="none")
    installed = in_fresh_process(_answers, dense, prompts, plugins=None)
    assert installed == without
    _, seen, has_worker = installed
    assert not has_worker
    assert all("duck" not in module for module in seen.values())
