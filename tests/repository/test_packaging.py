"""A source distribution has all that building and testing need; a duck needs little."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (
    "vllm_duck/**/*.h",
    "vllm_duck/**/*.cpp",
    "vllm_duck/**/*.py",
    "protos/**/*",
    "scripts/*",
    "testing/**/*.cpp",
    "testing/**/*.py",
    "tests/**/*.c",
    "tests/**/*.cpp",
    "tests/**/*.py",
    "benchmarks/**/*.cpp",
    "benchmarks/**/*.py",
    "docs/*.md",
    "examples/*",
    "Makefile",
    ".clang-format",
)
FOLDERS = ("vllm_duck", "protos", "scripts", "testing", "tests")
FOLDERS += ("benchmarks", "docs", "examples")
FILES = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "Makefile",
    ".clang-format",
    "README.md",
    "LICENSE",
)


@pytest.fixture(scope="module")
def sdist_names(tmp_path_factory):
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", "out"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (archive,) = (copy / "out").iterdir()
    with tarfile.open(archive) as file:
        return {name.partition("/")[2] for name in file.getnames()}


@pytest.mark.parametrize("pattern", NEEDED)
def test_the_sdist_has_every_source(sdist_names, pattern):
    files = [path for path in ROOT.glob(pattern) if path.is_file()]
    names = {str(path.relative_to(ROOT)) for path in files}
    assert names
    assert names <= sdist_names


def test_the_sdist_has_no_binaries(sdist_names):
    assert not [name for name in sdist_names if name.endswith((".so", ".pyc"))]


def test_the_base_install_needs_neither_torch_nor_vllm():
    requirements = importlib.metadata.requires("vllm-duck")
    base = [line for line in requirements if "extra ==" not in line]
    assert base
    assert not [line for line in base if "torch" in line or "vllm" in line]
