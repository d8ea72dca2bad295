"""Triton's interpreter, in which the kernels run where there is no GPU.

Triton reads its variable as a kernel is defined, its own library's among them. So
whoever wants it imports Triton first, and the kernels, within `interpreting()`; other
processes and what torch compiles see nothing of it.
"""

import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_VARIABLE = "TRITON_INTERPRET"
# The second is imported by the first call of a kernel, and looks at the variable too.
_TRITON = ("triton.language", "triton.experimental.gluon")


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are defined meanwhile run in the interpreter."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]


def import_triton() -> None:
    """To be called before anything else imports it; no harm where there is none."""
    with interpreting():
        if importlib.util.find_spec("triton"):
            for name in _TRITON:
                importlib.import_module(name)


def import_kernels() -> None:
    """All modules of the package."""
    with interpreting():
        package = importlib.import_module("vllm_duck.models.cuda.kernels")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def interpreted(kernel: Callable[..., None]) -> Any:
    """`triton.jit` for kernels of tests."""
    with interpreting():
        return importlib.import_module("triton").jit(kernel)
