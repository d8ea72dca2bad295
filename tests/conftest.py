"""Fixtures that every test may use."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nobody listens: tests must not wait for a usage report to fail.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "tiny-v32"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The bundled checkpoint; VLLM_DUCK_TINY_MODEL names another of its kind."""
    return Path(os.environ.get("VLLM_DUCK_TINY_MODEL", BUNDLED_MODEL))


@pytest.fixture(scope="session")
def tiny_v3_model(tiny_model, tmp_path_factory) -> Path:
    """The same weights as a dense DeepSeek-V3 in bf16, which stock vLLM serves."""
    import torch

    from benchmarks.oracle import write_dequantized

    out_dir = tmp_path_factory.mktemp("tiny-v3")
    return write_dequantized(tiny_model, out_dir, torch.bfloat16, as_dense_v3=True)
