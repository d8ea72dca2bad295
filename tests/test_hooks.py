"""The hooks: each target exists, none changes vLLM while duck is off."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

import vllm_duck
from vllm_duck import hooks, setup_engine
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


@pytest.mark.parametrize(
    "version", ["0.33.0", "0.32.1", "0.32.0rc1", "0.32.0.dev3+cpu", "0.32.0.post1"]
)
def test_another_vllm_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(
        DuckError, match=f"needs vLLM 0.32.0, got {re.escape(version)};"
    ):
        hooks.install_hooks()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu129"])
def test_a_build_of_the_version_is_accepted(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    hooks.install_hooks()


def test_the_version_is_written_once():
    root = PACKAGE.parent
    for path in [*PACKAGE.rglob("*.py"), root / "setup.py"]:
        if path != PACKAGE / "__init__.py":
            assert f'"{vllm_duck.VLLM_VERSION}"' not in path.read_text(), path


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


def _speculation(**model_classes):
    target = SimpleNamespace(model_class_overrides=model_classes)
    return SimpleNamespace(target_model_config=target)


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"logit_bias": {1: 1.0}}], ids=str)
def test_only_duck_s_speculation_allows_what_stock_vllm_lacks(option):
    hooks.install_hooks()
    params = SamplingParams(**option)
    params._validate_spec_decode(None)
    params._validate_spec_decode(_speculation(**setup_engine.MODEL_CLASSES))
    with pytest.raises(VLLMValidationError, match="not yet supported with specul"):
        params._validate_spec_decode(_speculation())


def test_the_runner_is_swapped_only_while_a_worker_builds_it():
    from vllm.v1.worker import cpu_worker, gpu_model_runner

    names = ((cpu_worker, "CPUModelRunner"), (gpu_model_runner, "build_logitsprocs"))
    before = [getattr(module, name) for module, name in names]

    class Runner:
        pass

    with hooks.using_model_runner(Runner):
        assert cpu_worker.CPUModelRunner is Runner
    assert [getattr(module, name) for module, name in names] == before


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
