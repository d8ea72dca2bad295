"""How a function of vLLM is found, checked and wrapped; which ones, say hooks.py."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_duck.errors import DuckError
from vllm_duck.version import VLLM_VERSION

_TAG = "_duck_original"


@dataclass(frozen=True)
class Hook:
    """One wrapped function: `make` wraps what it finds at `target`."""

    target: str
    parameters: tuple[str, ...]
    why: str
    remove_when: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]

    @property
    def owner(self) -> type | ModuleType:
        """The module or class that `target` names, or the class of an object."""
        module, name = self.target.rsplit(".", 2)[:2]
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            found = importlib.import_module(f"{module}.{name}")
        return found if isinstance(found, type | ModuleType) else type(found)

    @property
    def attribute(self) -> str:
        return self.target.rsplit(".", 1)[1]


def find(hook: Hook) -> Any:
    """What is at the target, as its class holds it.

    Raises:
        DuckError: nothing, or a function with other parameters.
    """
    original = inspect.getattr_static(hook.owner, hook.attribute, None)
    function = getattr(original, "__func__", original)
    function = getattr(function, _TAG, function)
    parameters = (
        tuple(inspect.signature(function).parameters) if callable(function) else None
    )
    if parameters != hook.parameters:
        raise DuckError(
            f"{hook.target} must take {hook.parameters} in vLLM {VLLM_VERSION}, got "
            f"{parameters}; vllm_duck/hooks.py must be brought up to this vLLM"
        )
    return original


def wrapped(hook: Hook, original: Any) -> Any:
    """What is to stand at the target in place of what was found; once is enough."""
    function = getattr(original, "__func__", original)
    if hasattr(function, _TAG):
        return original
    wrapper = functools.wraps(function)(hook.make(function))
    vars(wrapper)[_TAG] = function
    # As it was found: a method, a classmethod or a staticmethod.
    return wrapper if original is function else type(original)(wrapper)
