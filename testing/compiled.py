"""C++ of tests and benchmarks, compiled as the extensions are and loaded by ctypes."""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from testing.waiting import WAIT_S

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
    command = [compiler, *_FLAGS, str(source), *flags, "-o", str(library)]
    subprocess.run(command, check=True)


@cache
def load(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile and load it, once in a process; nothing is left on the disk."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, f"{source.stem}.so")
        build(source, library, *flags)
        return ctypes.CDLL(str(library))


def run_checks(checks: Path, directory: Path, *more_sources: Path) -> str:
    """Compile a program of checks in a directory and run it; what it says: "ok".

    Raises:
        CalledProcessError: a check failed, and the program says which on stderr.
    """
    program = directory / checks.stem
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{CSRC}"]
    sources = [str(path) for path in (checks, *more_sources)]
    subprocess.run([compiler, *flags, *sources, "-o", str(program)], check=True)
    done = subprocess.run(
        [program], stdout=subprocess.PIPE, text=True, timeout=WAIT_S, check=True
    )
    return done.stdout.strip()
