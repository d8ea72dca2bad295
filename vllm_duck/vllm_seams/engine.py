"""What worker, scheduler, registries and the engine's end rely on."""

from vllm_duck.seam import Seam

_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_KV_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager."

_NO_FAILED_STEP = "vLLM's scheduler lives on after a step that failed"
_ORDERLY_END = "vLLM stops reading outputs after its engine has ended"

ENGINE_SEAMS = (
    Seam(
        target=_CPU_WORKER + "init_device",
        use="override",
        why="builds the runner; hooks.using_cpu_runner swaps its class meanwhile",
        remove_when="CPUWorker asks _make_model_runner, as the GPU worker does",
        parameters="self",
        bodies=("a7e93c6997d4e6c2",),
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUModelRunner",
        use="call",
        why="the name that init_device builds, swapped meanwhile",
        remove_when="CPUWorker asks _make_model_runner, as the GPU worker does",
        parameters="vllm_config device",
    ),
    Seam(
        target=_CPU_WORKER + "determine_available_memory",
        use="override",
        why="hooks.page_cache_is_free counts a container's page cache as free",
        remove_when="get_cgroup_memory_usage leaves the page cache out",
        parameters="self",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        use="override",
        why="tells the ducks that a step begins, and how long it may wait for them",
        remove_when="a worker hears of a step's deadline",
        parameters="self scheduler_output",
    ),
    Seam(
        target=_SCHEDULER + "schedule",
        use="override",
        why="notes which requests a step has",
        remove_when=_NO_FAILED_STEP,
        parameters="self throttle_prefills",
    ),
    Seam(
        target=_SCHEDULER + "finish_requests",
        use="override",
        why="notes the blocks of requests that are aborted while their step runs",
        remove_when=_NO_FAILED_STEP,
        parameters="self request_ids finished_status",
    ),
    Seam(
        target=_SCHEDULER + "update_from_output",
        use="override",
        why="ends the requests of a failed step, and evicts what it was to write",
        remove_when=_NO_FAILED_STEP,
        parameters="self scheduler_output model_runner_output",
    ),
    Seam(
        target=_SCHEDULER + "grammar_compile_error_reqs",
        use="read",
        why="update_from_output ends the requests in it with an error",
        remove_when=_NO_FAILED_STEP,
    ),
    Seam(
        target=_SCHEDULER + "block_size",
        use="read",
        why="which blocks a step writes",
        remove_when=_NO_FAILED_STEP,
    ),
    Seam(
        target=_KV_MANAGER + "evict_blocks",
        use="call",
        why="takes blocks that were not written out of the prefix cache",
        remove_when=_NO_FAILED_STEP,
        parameters="self block_ids",
    ),
    Seam(
        target=_KV_MANAGER + "get_block_ids",
        use="call",
        why="which blocks a step writes",
        remove_when=_NO_FAILED_STEP,
        parameters="self request_id",
    ),
    Seam(
        target="vllm.utils.cpu_resource_utils:get_cgroup_memory_usage",
        use="override",
        why="wrapped while the worker and kv_space look for memory",
        remove_when="it leaves the page cache out",
    ),
    Seam(
        target="vllm.envs:environment_variables",
        use="read",
        why="the package's own variables are named there, or vLLM warns of them",
        remove_when="a plugin may name variables",
    ),
    Seam(
        target="vllm.config.model:_REGISTERED_MODEL_CLASS_OVERRIDES",
        use="read",
        why="cleared when an engine without ducks follows one with them",
        remove_when="model_class_overrides end with their engine",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_VLLM_MODELS",
        use="read",
        why="read to restore vLLM's own class then",
        remove_when="model_class_overrides end with their engine",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_resolve_module_name",
        use="call",
        why="called to restore vLLM's own class then",
        remove_when="model_class_overrides end with their engine",
        parameters="mod_relname",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_ModelInfo",
        use="read",
        why="a model of duck is inspected in the process that asks",
        remove_when="vLLM asks a model for its traits without a process of its own",
    ),
    Seam(
        target="vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER",
        use="read",
        why="whether the loader is registered already",
        remove_when="register_model_loader may be called twice in silence",
    ),
    Seam(
        target="vllm.v1.engine.utils:CoreEngineProcManager._finalizer",
        use="read",
        why="who stops the engine first, the server or vLLM's monitor",
        remove_when=_ORDERLY_END,
    ),
    Seam(
        target="vllm.v1.engine.core_client:BackgroundResources.engine_manager",
        use="read",
        why="is stopped before its outputs are no longer read",
        remove_when=_ORDERLY_END,
    ),
    Seam(
        target="vllm.v1.engine.core_client:BackgroundResources.engine_dead",
        use="read",
        why="whether the engine died before its end was asked for",
        remove_when=_ORDERLY_END,
    ),
    Seam(
        target="vllm.v1.engine.async_llm:AsyncLLM.output_handler",
        use="read",
        why="the task that reads the outputs",
        remove_when=_ORDERLY_END,
    ),
)
