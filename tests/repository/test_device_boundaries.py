"""What knows of CUDA: the GPU host, its worker, and what sets it up; nobody else."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import vllm_duck
import vllm_duck.models.cuda

PACKAGE = Path(vllm_duck.__file__).parent
# The last two are the set-up; vLLM has names with it that they use.
MAY_NAME_IT = ("models/cuda/", "cuda_worker.py", "setup_engine.py", "limits.py")
# Formats of the kernels' numbers.
FORMATS = "models/cuda/kernels/formats.py"


def identifiers(tree: ast.AST) -> set[str]:
    """Names that code gives or uses; texts and comments are none."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                found.add(name)
    return found


def test_no_other_module_has_cuda_in_its_identifiers():
    named = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        names = identifiers(ast.parse(path.read_text()))
        found = sorted(name for name in names if "cuda" in name.lower())
        if found and not place.startswith(MAY_NAME_IT):
            named[place] = found
    assert named == {}


def test_kernels_name_no_format_of_a_number_but_in_one_file():
    named = {}
    for path in (PACKAGE / "models/cuda/kernels").glob("*.py"):
        tree = ast.parse(path.read_text())
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        found = [
            node.attr
            for node in attributes
            if isinstance(node.value, ast.Name)
            and node.value.id == "tl"
            and node.attr.startswith(("bfloat16", "float16", "float8", "dot"))
        ]
        if found and path != PACKAGE / FORMATS:
            named[path.name] = found
    assert named == {}


def test_the_gpu_host_imports_without_vllm():
    package = vllm_duck.models.cuda
    prefix = f"{package.__name__}."
    modules = [m.name for m in pkgutil.walk_packages(package.__path__, prefix)]
    assert f"{prefix}kernels.gemm" in modules
    code = f"import sys\nsys.modules['vllm'] = None\nimport {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
