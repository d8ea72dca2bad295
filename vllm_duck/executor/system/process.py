"""What a duck process asks of, and undoes in, the operating system."""

import ctypes
import os
import platform
from pathlib import Path

# set_mempolicy(2) by architecture; libnuma wraps it, but need not be installed.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT = 0

# Set by vLLM for its own worker; in a duck they would pin or slow the kernel.
_INHERITED_ENV = ("LD_PRELOAD", "GOMP_CPU_AFFINITY", "MALLOC_CONF")
_INHERITED_ENV_PREFIXES = ("OMP_", "KMP_", "MKL_", "VLLM_")


def resident_bytes(pid: int | str = "self") -> int:
    """Bytes of RAM of a process; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_memory_policy() -> None:
    """Drop an inherited NUMA policy: vLLM's worker binds strictly to its own node."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None and platform.system() == "Linux":
        ctypes.CDLL(None).syscall(number, _MPOL_DEFAULT, None, 0)


def clean_environment() -> dict[str, str]:
    """This process's environment without what vLLM sets for its own worker."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _INHERITED_ENV and not name.startswith(_INHERITED_ENV_PREFIXES)
    }
