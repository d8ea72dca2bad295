"""Compiles kernels for GPUs that are not there, and reads what came out.

Triton brings its compiler and disassembler along. What is compiled is what a wrapper
starts: it is called with tensors that have a shape and no memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_duck.models.cuda.kernels import launch

ARCHS = (80, 86, 89, 90, 120)
# Bytes of shared memory that one program may have.
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_POINTERS = {
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}


def absent(*shape: int, dtype: torch.dtype = torch.uint16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Binary:
    """A kernel, compiled."""

    shared_bytes: int
    num_warps: int
    cubin: bytes
    # What its wrapper fixed when it was compiled.
    constants: dict[str, Any]

    @property
    def stack_bytes(self) -> int:
        """What registers were spilled to."""
        return int(self._usage["STACK"])

    @property
    def registers(self) -> int:
        return int(self._usage["REG"])

    @cached_property
    def _usage(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+):(\d+)", self._tool("cuobjdump", "-res-usage")))

    @cached_property
    def code(self) -> str:
        return self._tool("nvdisasm", "-c")

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes, to registers or to shared memory."""
        return len(re.findall(r"\bLDG(?:STS)?\.[\w.]*\b128\b", self.code))

    @property
    def byte_loads(self) -> int:
        return len(re.findall(r"\bLDG\.[\w.]*\b[US]8\b", self.code))

    @property
    def uses_wgmma(self) -> bool:
        """Another MMA instruction, of sm90 alone."""
        return "HGMMA" in self.code

    @property
    def loop_length(self) -> int:
        """Instructions of the longest loop: the one over K."""
        labels: dict[str, int] = {}
        longest, place = 0, 0
        for line in self.code.splitlines():
            if label := re.match(r"\s*(\.L_x?_?\w+):", line):
                labels[label[1]] = place
            elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
                place += 1
                target = re.search(r"BRA.*`\((\.L\w+)\)", line)
                if target and target[1] in labels:
                    longest = max(longest, place - labels[target[1]])
        return longest

    def _tool(self, name: str, *flags: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(_TOOLS / name), *flags, file.name]
            return subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout


def compiled(call: Callable[[], None], arch: int) -> list[Binary]:
    """The kernels that the call starts, for a GPU of this compute capability."""
    binaries: list[Binary] = []

    def enqueue(kernel, grid, args, constants, options):
        source = _source(kernel, args, constants)
        target = GPUTarget("cuda", arch, 32)
        made = triton.compile(source, target=target, options=options)
        shared = made.metadata.shared
        binary = Binary(shared, options["num_warps"], made.asm["cubin"], constants)
        binaries.append(binary)

    with patch.object(launch, "enqueue", enqueue):
        call()
    return binaries


def _source(kernel, args, constants) -> ASTSource:
    """As the wrapper starts it: pointers are aligned, integers are anything."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(args[place], Tensor):
            signature[name] = _POINTERS[args[place].dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    return ASTSource(kernel, signature, constants, attributes)
