"""C++ of tests and benchmarks, compiled as the extensions are and loaded by ctypes."""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

CSRC = Path(__file__).parent.parent / "vllm_duck" / "csrc"

# As in setup.py, where they change what is computed.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
    "-pthread",
    "-shared",
    "-fPIC",
    f"-I{CSRC}",
)


def build(source: Path, library: Path, *flags: str) -> None:
    """Compile one source into a shared library."""
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *_FLAGS, *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True)


@cache
def load(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile and load it, once in a process; nothing is left on the disk."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, f"{source.stem}.so")
        build(source, library, *flags)
        return ctypes.CDLL(str(library))
