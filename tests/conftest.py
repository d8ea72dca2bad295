"""Fixtures that every test may use."""

import os
from pathlib import Path

import pytest

from tests import failing_memory as failing_memory_library

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


@pytest.fixture
def hostile_directory(tmp_path) -> Path:
    """A directory in whose files an import would run, if it were on a path.

    A user's own queue.py beside the model, and a clone without its extensions.
    """
    directory = tmp_path / "hostile"
    directory.mkdir()
    for name in ("queue", "numpy", "socket", "logging", "json"):
        code = f'open("{name}.executed", "w")\nraise SystemExit("{name}.py was run")\n'
        (directory / f"{name}.py").write_text(code)
    (directory / "vllm_duck").mkdir()
    (directory / "vllm_duck" / "__init__.py").write_text('raise SystemExit("a clone")')
    return directory


@pytest.fixture(scope="session")
def failing_memory(tmp_path_factory) -> Path:
    """The library of tests/failing_memory.py, compiled."""
    return failing_memory_library.build(tmp_path_factory.mktemp("failing-memory"))
