"""Fixtures that every test may use."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testing.gpu.interpreter import import_triton
from testing.memory import failing as failing_memory_library

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nobody listens: tests must not wait for a usage report to fail.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Threads of torch that wait must not take the cpu from those that compute; and with an
# engine in each test process, one more thread for each is one too many.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before vLLM does: the GPU host's kernels are tested in Triton's interpreter.
import_triton()

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "tiny-v32"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The bundled checkpoint; VLLM_DUCK_TINY_MODEL names another of its kind."""
    return Path(os.environ.get("VLLM_DUCK_TINY_MODEL", BUNDLED_MODEL))


@pytest.fixture(scope="module")
def engines() -> Iterator[None]:
    """For modules that start engines in this process: they end with the module."""
    from testing.engines import closing_engines

    with closing_engines():
        yield


@pytest.fixture(autouse=True, scope="module")
def _environ() -> Iterator[None]:
    """What vLLM sets for itself is not what the next module's processes start with."""
    before = _vllm_environ()
    yield
    for name in _vllm_environ():
        del os.environ[name]
    os.environ.update(before)


def _vllm_environ() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith("VLLM_")}


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """A test draws the same numbers whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    # The executor's tests run where torch cannot: under a sanitizer.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that end what their module shares come last in it, in random order too.

    Modules that start engines take a minute or so: they come first, lest one process
    has the last of them when the other has nothing left.
    """
    place: dict[Path, tuple[bool, int]] = {}
    for at, item in enumerate(items):
        starts_no_engine = item.get_closest_marker("vllm") is None
        place.setdefault(item.path, (starts_no_engine, at))
    items.sort(key=lambda i: (place[i.path], i.get_closest_marker("last") is not None))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Beside the verdict, since -q leaves the header out."""
    seed = config.getoption("randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"this order again: --randomly-seed={seed}")


@pytest.fixture(scope="session")
def tiny_v3_model(tiny_model, tmp_path_factory) -> Path:
    """The same weights as a dense DeepSeek-V3 in bf16, which stock vLLM serves."""
    import torch

    from testing.oracle import write_dequantized

    out_dir = tmp_path_factory.mktemp("tiny-v3")
    return write_dequantized(tiny_model, out_dir, torch.bfloat16, as_dense_v3=True)


@pytest.fixture(scope="session")
def hostile_directory(tmp_path_factory) -> Path:
    """A directory in whose files an import would run, if it were on a path.

    A user's own files beside the model, and a clone without its extensions.
    """
    directory = tmp_path_factory.mktemp("hostile")
    # Of signal, socket and random multiprocessing is made: its children begin there.
    for name in ("queue", "signal", "socket", "random", "numpy", "grpc"):
        code = f'open("{name}.executed", "w")\nraise SystemExit("{name}.py was run")\n'
        (directory / f"{name}.py").write_text(code)
    (directory / "vllm_duck").mkdir()
    (directory / "vllm_duck" / "__init__.py").write_text('raise SystemExit("a clone")')
    return directory


@pytest.fixture(scope="session")
def failing_memory(tmp_path_factory) -> Path:
    """The library of testing/memory/failing.py, compiled."""
    return failing_memory_library.build(tmp_path_factory.mktemp("failing-memory"))
