"""The choice of the backend: the one module that knows which there are."""

from vllm_duck.models.backend import HostBackend
from vllm_duck.models.cpu.backend import CpuBackend


def host_backend() -> HostBackend:
    """The backend for the device that vLLM runs on."""
    return CpuBackend()
