"""The platforms of vLLM that a host may run on, and what it consists of on each.

The one place that chooses. docs/backends.md says what a second entry needs.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_duck.errors import DuckConfigError

if TYPE_CHECKING:
    # For the engine's front end, which reads the names alone, two seconds.
    from vllm_duck.models.backend import HostBackend


@dataclass(frozen=True)
class HostPlatform:
    """Classes by their names: they are imported on their platform alone."""

    # A `models.backend.HostBackend`.
    backend: str
    # A `worker.DuckWorker`, which makes its runner, a `spec_decode.DuckModelRunner`:
    # each with vLLM's own class for the platform behind it.
    worker: str
    # What has the platform's vLLM, for who has another one.
    install: str


# By vLLM's device type.
PLATFORMS = {
    "cpu": HostPlatform(
        backend="vllm_duck.models.cpu.backend.CpuBackend",
        worker="vllm_duck.cpu_worker.CpuDuckWorker",
        install="vllm_duck[cpu]",
    )
}


def host_platform() -> HostPlatform:
    """What a host is on the platform that vLLM runs on.

    Raises:
        DuckConfigError: duck has no host for it.
    """
    found = PLATFORMS.get(current_platform.device_type)
    if found is None:
        choices = (f"{name} ({each.install})" for name, each in PLATFORMS.items())
        raise DuckConfigError(
            f"duck's host computes on vLLM's platform {' or '.join(choices)}, got "
            f"{current_platform.device_type or 'none'}; install vLLM for one of them"
        )
    return found


def host_backend() -> "HostBackend":
    """The backend for the platform that vLLM runs on."""
    module, _, name = host_platform().backend.rpartition(".")
    make: Callable[[], HostBackend] = getattr(importlib.import_module(module), name)
    return make()
