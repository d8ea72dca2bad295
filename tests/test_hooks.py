"""The hooks: each target exists, none changes vLLM while duck is off."""

import ast
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

import vllm_duck
from vllm_duck import engine_environ, hook, hooks
from vllm_duck.config import HAND_OVER_KEY, VARIABLES
from vllm_duck.errors import DuckError
from vllm_duck.families import all_classes
from vllm_duck.version import VLLM_VERSION

DUCK = {HAND_OVER_KEY: {}}
PACKAGE = Path(vllm_duck.__file__).parent


def test_every_hook_target_exists_in_the_installed_vllm():
    for each in hooks.HOOKS:
        hook.find(each)


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
        if path != PACKAGE / "version.py":
            assert f'"{VLLM_VERSION}"' not in path.read_text(), path


def test_a_moved_target_is_refused_by_name():
    moved = hook.Hook(
        target="vllm.engine.arg_utils.EngineArgs.create_engine_config",
        parameters=("self", "somewhere_else"),
        why="",
        remove_when="",
        make=lambda original: original,
    )
    with pytest.raises(DuckError, match="create_engine_config must take"):
        hook.find(moved)


def _speculation(**model_classes):
    target = SimpleNamespace(model_class_overrides=model_classes)
    return SimpleNamespace(target_model_config=target)


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"logit_bias": {1: 1.0}}], ids=str)
def test_only_duck_s_speculation_allows_what_stock_vllm_lacks(option):
    hooks.install_hooks()
    params = SamplingParams(**option)
    params._validate_spec_decode(None)
    params._validate_spec_decode(_speculation(**all_classes()))
    with pytest.raises(VLLMValidationError, match="not yet supported with specul"):
        params._validate_spec_decode(_speculation())


def test_only_duck_s_own_scheduler_is_taken_without_a_warning(monkeypatch):
    from vllm.config import SchedulerConfig
    from vllm.config import scheduler as config_scheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_duck.limits import SCHEDULER_CLASS
    from vllm_duck.lost_ducks.scheduler import DuckScheduler

    hooks.install_hooks()
    warnings = []
    monkeypatch.setattr(
        config_scheduler.logger, "warning_once", lambda *args: warnings.append(args)
    )

    def taken(name):
        config = SchedulerConfig.default_factory(scheduler_cls=name)
        return config.get_scheduler_cls()

    assert taken(SCHEDULER_CLASS) is DuckScheduler
    assert not warnings
    of_another = f"{Scheduler.__module__}.{Scheduler.__qualname__}"
    assert taken(of_another) is Scheduler
    monkeypatch.setattr(config_scheduler, "resolve_obj_by_qualname", lambda name: name)
    assert taken("somebody.s.Scheduler") == "somebody.s.Scheduler"
    assert len(warnings) == 1


def test_the_runner_is_swapped_only_while_a_worker_builds_it():
    from vllm.v1.worker import cpu_worker, gpu_model_runner

    names = ((cpu_worker, "CPUModelRunner"), (gpu_model_runner, "build_logitsprocs"))
    before = [getattr(module, name) for module, name in names]

    class Runner:
        pass

    with hooks.using_cpu_runner(Runner), hooks.using_all_logits_processors():
        assert cpu_worker.CPUModelRunner is Runner
        assert gpu_model_runner.build_logitsprocs is not before[1]
    assert [getattr(module, name) for module, name in names] == before


def test_only_duck_s_own_models_are_inspected_without_a_second_process(monkeypatch):
    from vllm.model_executor.models import registry

    def refuse(function):
        raise AssertionError("a process was started")

    hooks.install_hooks()
    monkeypatch.setattr(registry, "_run_in_subprocess", refuse)
    for target in all_classes().values():
        info = registry._LazyRegisteredModel(*target.split(":")).inspect_model_cls()
        assert info.is_text_generation_model
        assert not info.supports_pp
    stock = registry._LazyRegisteredModel(
        "vllm.model_executor.models.gpt2", "GPT2LMHeadModel"
    )
    monkeypatch.setattr(stock.__class__, "_load_modelinfo_from_cache", lambda *_: None)
    with pytest.raises(AssertionError, match="a process was started"):
        stock.inspect_model_cls()


class _Engine:
    """As much of an AsyncLLM as `shutdown` touches before vLLM's own body."""

    def __init__(self, additional_config):
        self.vllm_config = SimpleNamespace(additional_config=additional_config)
        self.output_handler = None
        self.seen = []
        finalizer = SimpleNamespace(alive=True)
        manager = SimpleNamespace(shutdown=self.seen.append, _finalizer=finalizer)
        resources = SimpleNamespace(engine_manager=manager, engine_dead=False)
        self.engine_core = SimpleNamespace(resources=resources)

    def stop(self, timeout):
        self.engine_core.resources.engine_manager.shutdown(timeout)


@pytest.mark.parametrize(
    ("additional_config", "timeout", "given"),
    [(DUCK, 0, 7), (DUCK, 3, 3), ({}, 0, 0)],
    ids=["ducks need time to end", "a user's own time", "stock"],
)
def test_processes_get_time_to_end_where_vllm_gives_none(
    monkeypatch, additional_config, timeout, given
):
    monkeypatch.setenv(engine_environ.STOP_VARIABLE, "7")
    engine = _Engine(additional_config)
    hooks._let_the_engine_end(_Engine.stop)(engine, timeout)
    assert engine.seen == [given]


def test_outputs_are_read_until_the_engine_has_ended(monkeypatch):
    """vLLM's monitor asks for its end, too, while requests have time to end."""
    engine = _Engine(DUCK)
    manager = engine.engine_core.resources.engine_manager
    cancelled = []
    monkeypatch.setattr(
        "vllm.utils.async_utils.cancel_task_threadsafe", cancelled.append
    )
    engine.output_handler = "the task"

    def stop(timeout):
        manager._finalizer.alive = False
        engine.engine_core.resources.engine_manager.shutdown(None)
        assert not cancelled

    manager.shutdown = stop
    hooks._let_the_engine_end(_Engine.stop)(engine, 3)
    assert cancelled == ["the task"]


@pytest.mark.parametrize("attributes", [{}, {"engine_core": None}], ids=str)
def test_an_engine_that_did_not_start_can_be_ended(attributes):
    config = SimpleNamespace(additional_config=DUCK)
    engine = SimpleNamespace(vllm_config=config, **attributes)
    timeouts = []
    end = hooks._let_the_engine_end(lambda engine, timeout: timeouts.append(timeout))
    end(engine, 3)
    assert timeouts == [3]


@pytest.mark.parametrize(
    ("additional_config", "expected"), [(DUCK, "1"), ({}, None)], ids=["duck", "stock"]
)
def test_an_engine_s_process_starts_without_the_working_directory(
    monkeypatch, additional_config, expected
):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    seen = []

    def start(self, count, vllm_config):
        seen.append((count, os.environ.get("PYTHONSAFEPATH")))

    config = SimpleNamespace(additional_config=additional_config)
    hooks._start_off_the_cwd(start)(None, 1, vllm_config=config)
    assert seen == [(1, expected)]
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.parametrize("has_ducks", [True, False])
def test_an_engine_with_ducks_leaves_ctrl_c_to_its_server(monkeypatch, has_ducks):
    calls = []
    monkeypatch.setattr(signal, "signal", lambda *args: calls.append(args))
    config = SimpleNamespace(additional_config=DUCK if has_ducks else {})
    loop = hooks._leave_ctrl_c_to_the_server(lambda engine: calls.append("loop"))
    loop(SimpleNamespace(vllm_config=config))
    ignored = [(signal.SIGINT, signal.SIG_IGN)] if has_ducks else []
    assert calls == [*ignored, "loop"]


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


def test_vllm_knows_the_package_s_variables(monkeypatch):
    """It warns of every other name with its prefix."""
    from vllm import envs

    hooks.install_hooks()
    for name in VARIABLES:
        monkeypatch.setenv(name, "given")
        assert envs.environment_variables[name]() == "given"
