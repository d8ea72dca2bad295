"""The model families that duck serves: each file here is one, with its FAMILY."""

import importlib
import pkgutil

from vllm_duck.errors import DuckConfigError
from vllm_duck.family import ModelFamily


def all_families() -> tuple[ModelFamily, ...]:
    """One for each file here, in the order of their names."""
    return tuple(
        importlib.import_module(f"{__name__}.{module.name}").FAMILY
        for module in pkgutil.iter_modules(__path__)
    )


def all_classes() -> dict[str, str]:
    """Of all families: vLLM's architecture to "module:class"."""
    return {
        architecture: model_class
        for family in all_families()
        for architecture, model_class in family.classes.items()
    }


def family_of(architectures: object) -> ModelFamily:
    """Find the family that config.json's `architectures` names.

    Raises:
        DuckConfigError: none of them.
    """
    served = {family.architecture: family for family in all_families()}
    for name in architectures if isinstance(architectures, list | tuple) else ():
        if isinstance(name, str) and name in served:
            return served[name]
    raise DuckConfigError(f"duck serves {' or '.join(served)}, got {architectures!r}")
