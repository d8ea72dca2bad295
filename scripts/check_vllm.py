"""Hold everything that vllm_duck relies on in vLLM against the source of a version.

    python scripts/check_vllm.py 0.33.0          # downloads that wheel, alone
    python scripts/check_vllm.py --tree DIR      # a directory that has vllm/ in it

Names, parameters and, where vllm_duck replaces or repeats a function, its body: those
are compared by a digest, and a difference is shown against the vLLM that is installed.
Nothing of vLLM is imported. Exit code 1: something differs.
"""

import argparse
import ast
import difflib
import functools
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vllm_duck.hooks import HOOKS
from vllm_duck.seam import Seam, parameters_problem
from vllm_duck.server_hooks import SERVER_HOOKS
from vllm_duck.vllm_seams import SEAMS

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    options = _parse_options()
    if options.tree is not None:
        return _report(options.tree)
    with tempfile.TemporaryDirectory() as folder:
        return _report(_downloaded(options.version, Path(folder)))


def problems(tree: Path) -> Iterator[str]:
    """What in this source is not as the ledgers say, one text each."""
    for seam in all_seams():
        problem = _problem(seam, tree)
        if problem:
            yield f"{seam.target}: {problem}\n    {seam.why}"


def all_seams() -> list[Seam]:
    """Both ledgers, as names in the source."""
    return [
        *(
            Seam(
                _in_source(hook.target),
                "override",
                hook.why,
                hook.remove_when,
                " ".join(hook.parameters),
            )
            for hook in (*HOOKS, *SERVER_HOOKS)
        ),
        *SEAMS,
    ]


def _in_source(target: str) -> str:
    """vllm.module.Class.name -> vllm.module:Class.name; a function is no class's."""
    target = target.replace(
        "vllm.platforms.current_platform", "vllm.platforms.cpu.CpuPlatform"
    )
    module, owner, name = target.rsplit(".", 2)
    is_class = owner.lstrip("_")[0].isupper()
    return f"{module}:{owner}.{name}" if is_class else f"{module}.{owner}:{name}"


def digest(function: Definition) -> str:
    """Of what it does: comments, docstrings and layout do not count."""
    body = function.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]
    dump = ast.dump(ast.Module(body, [])) + ast.dump(function.args)
    return hashlib.sha256(dump.encode()).hexdigest()[:16]


def find(tree: Path, seam: Seam) -> Definition | None:
    """The class or function of that name, imported ones by their name alone."""
    scope: ast.AST = _parsed(tree, seam.module)
    for name in seam.qualname.split("."):
        found = [
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, Definition) and node.name == name
        ]
        if not found:
            return None
        scope = found[-1]
    assert isinstance(scope, Definition)
    return scope


def _problem(seam: Seam, tree: Path) -> str:
    found = find(tree, seam)
    if found is None:
        return "" if _is_named(tree, seam) else "is gone"
    if isinstance(found, ast.ClassDef):
        return ""
    problem = parameters_problem(seam, *_parameters(found))
    if not problem and seam.bodies and digest(found) not in seam.bodies:
        problem = f"has another body, {digest(found)}:\n{_difference(seam, found)}"
    return problem


def _is_named(tree: Path, seam: Seam) -> bool:
    """Whether a variable, an attribute or an import has the last part of the name."""
    *_, name = seam.qualname.split(".")
    for node in ast.walk(_parsed(tree, seam.module)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(
            node.ctx, ast.Store
        ):
            if name == (node.id if isinstance(node, ast.Name) else node.attr):
                return True
        elif isinstance(node, ast.alias) and name == (node.asname or node.name):
            return True
    return False


def _parameters(function: Definition) -> tuple[str, int]:
    """Their names, and how many have defaults."""
    assert not isinstance(function, ast.ClassDef)
    given = function.args
    names = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs]
    defaults = [*given.defaults, *given.kw_defaults]
    return (
        " ".join(each.arg for each in [*names, given.kwarg] if each is not None),
        sum(each is not None for each in defaults),
    )


def _difference(seam: Seam, found: Definition) -> str:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "(install the supported vLLM to see the difference)"
    ours = find(Path(spec.origin).parent.parent, seam)
    before = [] if ours is None else ast.unparse(ours).splitlines()
    lines = difflib.unified_diff(
        before, ast.unparse(found).splitlines(), "installed", "this version", n=2
    )
    return "\n".join(f"    {line}" for line in lines)


def _parsed(tree: Path, module: str) -> ast.Module:
    path = tree.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return _parse(file.read_text() if file.is_file() else "")


# Some files have 7,000 lines and a dozen names of the ledgers.
_parse = functools.lru_cache(ast.parse)


def _report(tree: Path) -> int:
    found = list(problems(tree))
    for problem in found:
        print(problem)
    print(f"{len(all_seams())} names of vLLM held against {tree}: {len(found)} differ")
    return 1 if found else 0


def _downloaded(version: str, folder: Path) -> Path:
    """That version's wheel without what it depends on, unpacked; 350 MB to fetch."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder, sources)
    return folder


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("version", nargs="?", help="a release of vllm, as 0.33.0")
    which.add_argument("--tree", type=Path, help="a directory that has vllm/ in it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
