"""What vllm_duck changes in vLLM itself, and the vLLM version it was written for.

The functions of vLLM in HOOKS are wrapped, in an API server also those of server_hooks,
and three names are swapped for a moment. With duck off, the wrappers hand over to
vLLM's own function and change nothing. The rest goes
through its public seams (entry point, `worker_cls`, `load_format`,
`model_class_overrides`, `additional_config`) and through classes of ours that override
methods of vLLM's runner, proposer and worker, or read their state, both private ones
too: worker.py, cpu_worker.py, lost_ducks/scheduler.py and
spec_decode/{runner,proposer,acceptance}.py. `vllm_seams` is their ledger.
"""

import copy
import functools
import inspect
import os
import signal
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

from vllm_duck import engine_environ
from vllm_duck.config import VARIABLES, is_duck_engine
from vllm_duck.ending import end_with_parent, stop_in_order
from vllm_duck.errors import DuckError
from vllm_duck.hook import Hook, find, wrapped
from vllm_duck.server_hooks import SERVER_HOOKS
from vllm_duck.version import VLLM_VERSION


def install_hooks() -> None:
    """Check every target, then wrap them all; a second call does nothing.

    Raises:
        DuckError: vLLM is of another version, or a target has moved.
    """
    import vllm

    if vllm.__version__.partition("+")[0] != VLLM_VERSION:
        raise DuckError(
            f"vllm_duck needs vLLM {VLLM_VERSION}, got {vllm.__version__}; install "
            "vllm_duck[cpu], or see vllm_duck/version.py"
        )
    _wrap(HOOKS)
    _register_loader()
    _name_variables()


def _wrap(hooks: Iterable[Hook]) -> None:
    for hook, original in [(hook, find(hook)) for hook in hooks]:
        setattr(hook.owner, hook.attribute, wrapped(hook, original))


def install_server_hooks() -> None:
    """The same for what only an API server of an engine with ducks needs.

    Raises:
        DuckError: a target has moved.
    """
    from vllm.entrypoints.serve.instrumentator import health

    original = health.health
    _wrap(SERVER_HOOKS)
    for route in health.router.routes:
        # No server is made of them yet; a route holds the function itself.
        if route.endpoint is original:
            route.endpoint = health.health


def _configure_duck(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(
        self: Any, usage_context: Any = None, headless: bool = False
    ) -> Any:
        from vllm.usage.usage_lib import UsageContext

        from vllm_duck import kv_space, setup_engine

        config = setup_engine.duck_config(self, os.environ)
        if config is None:
            _restore_stock(os.environ)
            return original(self, usage_context, headless)
        if usage_context is UsageContext.OPENAI_API_SERVER:
            install_server_hooks()
        resolved = setup_engine.resolve(config, self, os.environ)
        args = setup_engine.rewrite(self, resolved)
        with _choices(os.environ), engine_environ.safe_path(os.environ):
            vllm_config = original(args, usage_context, headless)
            setup_engine.check(vllm_config)
            with page_cache_is_free():
                kv_space.set_default(vllm_config)
        return vllm_config

    return create_engine_config


@contextmanager
def _choices(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Choose vLLM's V1 runner, and time to end, for this process and its children.

    Undone if what follows fails, unless an engine with ducks was configured before.
    """
    is_first = engine_environ.choose(environ)
    try:
        yield
    except BaseException:
        if is_first:
            _restore_stock(environ)
        raise


def _start_off_the_cwd(
    original: Callable[..., Any],
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        has_ducks = is_duck_engine(given["vllm_config"])
        with engine_environ.safe_path(os.environ) if has_ducks else nullcontext():
            original(self, *args, **kwargs)

    return start


def _name_the_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any) -> Any:
        from vllm_duck.spec_decode.method import METHODS

        parser = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings:
                action.choices = [*(action.choices or ()), *METHODS]
        return parser

    return add_cli_args


def _keep_chunks_and_prefixes(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        original(cls, vllm_config)
        if is_duck_engine(vllm_config):
            (
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching,
            ) = kept

    return check_and_update_config


def _take_duck_s_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_scheduler_cls(self: Any) -> Any:
        from vllm_duck.limits import SCHEDULER_CLASS

        if self.scheduler_cls != SCHEDULER_CLASS:
            return original(self)
        from vllm_duck.lost_ducks.scheduler import DuckScheduler

        return DuckScheduler

    return get_scheduler_cls


def _allow_every_option(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        from vllm_duck import setup_engine

        if speculative_config is not None and setup_engine.is_duck_speculation(
            speculative_config
        ):
            return
        original(self, speculative_config)

    return _validate_spec_decode


def _inspect_in_this_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def inspect_model_cls(self: Any) -> Any:
        from vllm.model_executor.models import registry

        from vllm_duck.families import all_classes

        if f"{self.module_name}:{self.class_name}" in all_classes().values():
            return registry._ModelInfo.from_model_cls(self.load_model_cls())
        return original(self)

    return inspect_model_cls


def _let_the_engine_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: Any, timeout: float | None = None) -> None:
        if is_duck_engine(self.vllm_config):
            stop_in_order(self)
        original(self, timeout)

    return shutdown


def _leave_ctrl_c_to_the_server(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_busy_loop(self: Any) -> None:
        if is_duck_engine(self.vllm_config):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            end_with_parent()
        original(self)

    return run_busy_loop


@contextmanager
def using_all_logits_processors() -> Iterator[None]:
    """Let vLLM's worker build its runner with every logits processor.

    vLLM leaves logit_bias and min_p out when an engine speculates; duck's sampler takes
    one row at a time and applies them all. The name is swapped in this process only,
    and put back.
    """
    from vllm.v1.worker import gpu_model_runner

    build = gpu_model_runner.build_logitsprocs

    def build_logitsprocs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        return build(plain, *args, **kwargs)

    gpu_model_runner.build_logitsprocs = build_logitsprocs
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = build


@contextmanager
def using_cpu_runner(runner_class: type) -> Iterator[None]:
    """Let vLLM's CPU worker build this runner: its init_device offers no other way."""
    from vllm.v1.worker import cpu_worker

    runner = cpu_worker.CPUModelRunner
    cpu_worker.CPUModelRunner = runner_class
    try:
        yield
    finally:
        cpu_worker.CPUModelRunner = runner


@contextmanager
def page_cache_is_free() -> Iterator[None]:
    """Let vLLM count a container's page cache as free, as it does outside of one.

    A container that has read a checkpoint looks full to it, and caches that fit do not.
    """
    from vllm.utils import cpu_resource_utils

    from vllm_duck.executor.system.cgroup_memory import page_cache_bytes

    original = cpu_resource_utils.get_cgroup_memory_usage

    def get_cgroup_memory_usage() -> int | None:
        usage = original()
        return None if usage is None else max(0, usage - page_cache_bytes())

    cpu_resource_utils.get_cgroup_memory_usage = get_cgroup_memory_usage
    try:
        yield
    finally:
        cpu_resource_utils.get_cgroup_memory_usage = original


def _restore_stock(environ: MutableMapping[str, str]) -> None:
    """Undo what an earlier engine with ducks set in this very process."""
    from vllm.config import model as config_model
    from vllm.model_executor.models import registry

    from vllm_duck.families import all_classes

    engine_environ.unset(environ)
    registered = config_model._REGISTERED_MODEL_CLASS_OVERRIDES
    for architecture, model_class in all_classes().items():
        if (architecture, model_class) not in registered:
            continue
        registered.discard((architecture, model_class))
        if architecture not in registry._VLLM_MODELS:
            continue
        module, name = registry._VLLM_MODELS[architecture]
        registry.ModelRegistry.register_model(
            architecture, f"{registry._resolve_module_name(module)}:{name}"
        )


def _name_variables() -> None:
    """Of variables with its prefix that it does not know, vLLM warns."""
    from vllm import envs

    for name in VARIABLES:
        envs.environment_variables.setdefault(
            name, functools.partial(os.environ.get, name)
        )


def _register_loader() -> None:
    from vllm.model_executor import model_loader

    from vllm_duck.limits import LOAD_FORMAT

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from vllm_duck.models.loader import DuckModelLoader

        model_loader.register_model_loader(LOAD_FORMAT)(DuckModelLoader)


HOOKS = (
    Hook(
        target="vllm.engine.arg_utils.EngineArgs.create_engine_config",
        parameters=("self", "usage_context", "headless"),
        why="the one path of LLM, AsyncLLM and `vllm serve` to a VllmConfig: duck "
        "sets its worker, model and loader there, and refuses what it cannot do",
        remove_when="vLLM lets a plugin edit EngineArgs before they are used",
        make=_configure_duck,
    ),
    Hook(
        target="vllm.engine.arg_utils.EngineArgs.add_cli_args",
        parameters=("parser",),
        why="--spec-method takes vLLM's own methods alone: with duck_mtp1 among its "
        "choices, the short form does what --speculative-config does",
        remove_when="vLLM lets a plugin name a speculative method",
        make=_name_the_method,
    ),
    Hook(
        target="vllm.platforms.current_platform.check_and_update_config",
        parameters=("cls", "vllm_config"),
        why="vLLM turns chunked prefill and prefix caching off for MLA on a CPU "
        "without AMX, since its own kernel lacks them; duck's attention has both",
        remove_when="the platform asks the attention backend what it supports",
        make=_keep_chunks_and_prefixes,
    ),
    Hook(
        target="vllm.config.scheduler.SchedulerConfig.get_scheduler_cls",
        parameters=("self",),
        why="vLLM warns of every scheduler but its own that it may not fit, at each "
        "start; that duck's does is checked by the ledger of vllm_seams",
        remove_when="vLLM's scheduler interface is public",
        make=_take_duck_s_scheduler,
    ),
    Hook(
        target="vllm.sampling_params.SamplingParams._validate_spec_decode",
        parameters=("self", "speculative_config"),
        why="vLLM refuses logit_bias and min_p under speculation, since its rejection "
        "sampler lacks them; duck's has both",
        remove_when="vLLM's rejection sampler applies every logits processor",
        make=_allow_every_option,
    ),
    Hook(
        target="vllm.model_executor.models.registry._LazyRegisteredModel"
        ".inspect_model_cls",
        parameters=("self",),
        why="vLLM imports a model class in a process of its own, lest CUDA be "
        "initialised: ten seconds for each of duck's two at the first start; to "
        "import these takes 0.2 s and touches no device",
        remove_when="vLLM takes a model's properties from the class's entry point",
        make=_inspect_in_this_process,
    ),
    Hook(
        target="vllm.v1.engine.utils.CoreEngineProcManager.__init__",
        parameters=(
            *("self", "local_engine_count", "start_index", "local_start_index"),
            *("vllm_config", "local_client", "handshake_address", "executor_class"),
            *("log_stats", "client_handshake_address", "tensor_queue"),
        ),
        why="the engine's process, and what it starts in turn, would run a file of the "
        "working directory that is named like a module of Python's",
        remove_when="vLLM starts its processes with -P",
        make=_start_off_the_cwd,
    ),
    Hook(
        target="vllm.v1.engine.async_llm.AsyncLLM.shutdown",
        parameters=("self", "timeout"),
        why="by default, --shutdown-timeout 0, `vllm serve` gives the engine's "
        "processes no time either: it kills engine, worker and ducks, and every stop "
        "ends in warnings and a traceback",
        remove_when="the time for requests is not the time for the processes",
        make=_let_the_engine_end,
    ),
    Hook(
        target="vllm.v1.engine.core.EngineCoreProc.run_busy_loop",
        parameters=("self",),
        why="a Ctrl-C reaches every process of a terminal: the engine starts to end, "
        "and the SIGTERM with which the server asks for that kills it halfway; and an "
        "engine whose server was killed runs on",
        remove_when="an engine that is ending survives a second signal, and one that "
        "has lost its server ends",
        make=_leave_ctrl_c_to_the_server,
    ),
)
