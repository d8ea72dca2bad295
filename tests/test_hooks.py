"""The hooks: each target exists, none changes vLLM while duck is off."""

import ast
from pathlib import Path

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

import vllm_duck
from vllm_duck import hooks
from vllm_duck.errors import DuckError

PACKAGE = Path(vllm_duck.__file__).parent


def test_every_hook_target_exists_in_the_installed_vllm():
    for hook in hooks.HOOKS:
        hooks._find(hook)


def test_installing_twice_changes_nothing():
    hooks.install_hooks()
    first = EngineArgs.create_engine_config
    hooks.install_hooks()
    assert EngineArgs.create_engine_config is first


def test_another_vllm_version_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(DuckError, match=r"needs vLLM 0.32.0, got 0.33.0"):
        hooks.install_hooks()


def test_a_moved_target_is_refused_by_name():
    moved = hooks.Hook(
        target="vllm.engine.arg_utils.EngineArgs.create_engine_config",
        parameters=("self", "somewhere_else"),
        why="",
        remove_when="",
        owner=lambda: EngineArgs,
        make=lambda original: original,
    )
    with pytest.raises(DuckError, match="create_engine_config must take"):
        hooks._find(moved)


def _names_of_vllm(tree):
    """Names that a module binds by importing vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_vllm(node.module or ""):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_vllm(alias.name):
                    yield alias.name, (alias.asname or alias.name).split(".")[0]


def _is_vllm(module):
    return module == "vllm" or module.startswith("vllm.")


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "hooks.py":
            yield path, ast.parse(path.read_text())


def test_no_other_module_imports_private_names_of_vllm():
    for path, tree in _modules():
        private = [n for n, _ in _names_of_vllm(tree) if n.startswith("_")]
        assert not private, f"{path}: {private}"


def test_no_other_module_assigns_to_vllm():
    for path, tree in _modules():
        names = {bound for _, bound in _names_of_vllm(tree)}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute):
                    root = target
                    while isinstance(root, ast.Attribute):
                        root = root.value
                    assert not (isinstance(root, ast.Name) and root.id in names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "setattr", path
