"""What an engine with ducks needs of vLLM's settings, as data.

Each limit is checked twice: on the arguments, before anything is fetched and before
vLLM's own checks, which would advise what duck cannot do; and on the finished
configuration, which also holds what came another way. docs/vllm-options.md says the
same for every field, and a test holds the two together.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.config import CUDAGraphMode

from vllm_duck.errors import DuckConfigError
from vllm_duck.models.platforms import PLATFORMS

LOAD_FORMAT = "duck"
SCHEDULER_CLASS = "vllm_duck.lost_ducks.scheduler.DuckScheduler"


@dataclass(frozen=True)
class Limit:
    """A setting and the values that duck takes; unset is always fine."""

    # What a user types.
    flag: str
    allowed: tuple[object, ...]
    why: str
    # Dotted paths from EngineArgs and from VllmConfig; empty: nothing is there.
    argument: str = ""
    field: str = ""


_ONE_HOST = "attention runs in one process, and the ducks share the experts out"
_EXPERTS = "the ducks hold the experts, and no worker of vLLM does"
_V2_ONLY = "vLLM has it in its V2 model runner alone, and duck is built on V1"
_GENERATES = "duck generates text"
_OWN_LAYERS = "duck computes the layers with kernels of its own"
_OWN_LOADER = "duck reads bf16 and block-fp8 checkpoints as they are"
_KV_STAYS = "the formats of duck's KV caches are its own and stay on the host"
_WEIGHTS_STAY = "packed weights stay where they are until the engine ends"


def _parallel(name: str, flag: str, allowed: object, why: str) -> Limit:
    return Limit(flag, (allowed,), why, name, f"parallel_config.{name}")


def _model(name: str, flag: str, allowed: tuple[object, ...], why: str) -> Limit:
    return Limit(flag, allowed, why, name, f"model_config.{name}")


def _attention(name: str, *allowed: object) -> Limit:
    path = f"attention_config.{name}"
    return Limit(f"{name} of --attention-config", allowed, _OWN_LAYERS, path, path)


LIMITS = (
    _parallel("pipeline_parallel_size", "--pipeline-parallel-size", 1, _ONE_HOST),
    _parallel("tensor_parallel_size", "--tensor-parallel-size", 1, _ONE_HOST),
    _parallel("data_parallel_size", "--data-parallel-size", 1, _ONE_HOST),
    _parallel(
        "prefill_context_parallel_size", "--prefill-context-parallel-size", 1, _ONE_HOST
    ),
    _parallel(
        "decode_context_parallel_size", "--decode-context-parallel-size", 1, _ONE_HOST
    ),
    _parallel("nnodes", "--nnodes", 1, _ONE_HOST),
    Limit(
        "--distributed-executor-backend",
        ("mp", "uni"),
        _ONE_HOST,
        "distributed_executor_backend",
        "parallel_config.distributed_executor_backend",
    ),
    _parallel("enable_expert_parallel", "--enable-expert-parallel", False, _EXPERTS),
    _parallel("enable_ep_weight_filter", "--enable-ep-weight-filter", False, _EXPERTS),
    _parallel("enable_eplb", "--enable-eplb", False, _EXPERTS),
    _parallel("enable_elastic_ep", "--enable-elastic-ep", False, _EXPERTS),
    _parallel("enable_fault_tolerance", "--enable-fault-tolerance", False, _EXPERTS),
    _parallel("enable_dbo", "--enable-dbo", False, "duck has two lanes of its own"),
    _parallel("ubatch_size", "--ubatch-size", 0, "duck has two lanes of its own"),
    _parallel(
        "enable_batch_sharded_sampling",
        "--enable-batch-sharded-sampling",
        False,
        _V2_ONLY,
    ),
    Limit(
        "--worker-cls",
        ("auto", *(each.worker for each in PLATFORMS.values())),
        "the worker is duck's",
        "worker_cls",
        "parallel_config.worker_cls",
    ),
    _model("model_impl", "--model-impl", ("auto", "vllm"), "the model is duck's"),
    _model("model_weights", "--model-weights", (), _OWN_LOADER),
    _model("runner", "--runner", ("auto", "generate"), _GENERATES),
    _model("convert", "--convert", ("auto", "none"), _GENERATES),
    _model("pooler_config", "--pooler-config", (), _GENERATES),
    Limit("--runner", ("generate",), _GENERATES, field="model_config.runner_type"),
    _model("code_revision", "--code-revision", (), "the model is duck's"),
    _model("config_format", "--config-format", ("auto", "hf"), _OWN_LOADER),
    _model("quantization", "--quantization", ("fp8",), _OWN_LOADER),
    _model("quantization_config", "--quantization-config", (), _OWN_LOADER),
    Limit("--dtype", ("auto", "bfloat16"), _OWN_LAYERS, "dtype"),
    Limit("--dtype", (torch.bfloat16,), _OWN_LAYERS, field="model_config.dtype"),
    Limit(
        "--load-format",
        ("auto", "safetensors", LOAD_FORMAT),
        _OWN_LOADER,
        "load_format",
        "load_config.load_format",
    ),
    _model("enable_sleep_mode", "--enable-sleep-mode", (False,), _WEIGHTS_STAY),
    _model(
        "enable_cumem_allocator", "--enable-cumem-allocator", (False,), _WEIGHTS_STAY
    ),
    Limit(
        "--weight-transfer-config",
        (),
        _WEIGHTS_STAY,
        "weight_transfer_config",
        "weight_transfer_config",
    ),
    Limit(
        "--cpu-offload-gb",
        (0,),
        _WEIGHTS_STAY,
        "cpu_offload_gb",
        "offload_config.uva.cpu_offload_gb",
    ),
    Limit(
        "--offload-group-size",
        (0,),
        _WEIGHTS_STAY,
        "offload_group_size",
        "offload_config.prefetch.offload_group_size",
    ),
    _model("enable_prompt_embeds", "--enable-prompt-embeds", (False,), "untested"),
    _model("enable_trace_replay", "--enable-trace-replay", (False,), _V2_ONLY),
    _model("return_sampling_mask", "--return-sampling-mask", (False,), _V2_ONLY),
    Limit(
        "--enable-return-routed-experts",
        (False,),
        _V2_ONLY,
        "aux_output_config.enable_return_routed_experts",
        "aux_output_config.enable_return_routed_experts",
    ),
    Limit("--watermark-config", (), _V2_ONLY, "watermark_config", "watermark_config"),
    Limit("--diffusion-config", (), _GENERATES, "diffusion_config", "diffusion_config"),
    Limit(
        "--engram-config", (), "it is of other models", "engram_config", "engram_config"
    ),
    Limit(
        "--enable-lora",
        (False,),
        "the ducks' weights take no adapters",
        "enable_lora",
        "lora_config",
    ),
    Limit(
        "--kv-offloading-size",
        (),
        _KV_STAYS,
        "kv_offloading_size",
        "cache_config.kv_offloading_size",
    ),
    Limit(
        "--kv-transfer-config",
        (),
        _KV_STAYS,
        "kv_transfer_config",
        "kv_transfer_config",
    ),
    Limit(
        "--ec-transfer-config",
        (),
        "it is of multimodal models",
        "ec_transfer_config",
        "ec_transfer_config",
    ),
    Limit(
        "--kv-cache-dtype-skip-layers",
        (),
        _KV_STAYS,
        "kv_cache_dtype_skip_layers",
        "cache_config.kv_cache_dtype_skip_layers",
    ),
    Limit(
        "--kv-sharing-fast-prefill",
        (False,),
        _OWN_LAYERS,
        "kv_sharing_fast_prefill",
        "cache_config.kv_sharing_fast_prefill",
    ),
    Limit(
        "--attention-backend",
        (),
        _OWN_LAYERS,
        "attention_backend",
        "attention_config.backend",
    ),
    _attention("backend_per_kind"),
    _attention("hisparse_config"),
    _attention("indexer_kv_dtype", "auto"),
    _attention("indexer_sparse_logits", False),
    _attention("use_non_causal", False),
    Limit(
        "--async-scheduling",
        (False,),
        "a step's drafts are confirmed before the next is scheduled",
        "async_scheduling",
        "scheduler_config.async_scheduling",
    ),
    Limit(
        "--scheduler-cls",
        (SCHEDULER_CLASS,),
        "a scheduler of duck's own ends the requests of a step without a duck",
        "scheduler_cls",
        "scheduler_config.scheduler_cls",
    ),
    Limit(
        "cudagraph_mode of --compilation-config",
        (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE),
        "full graphs would not replay the calls to the ducks",
        "compilation_config.cudagraph_mode",
        "compilation_config.cudagraph_mode",
    ),
)


def check_arguments(args: Any) -> None:
    """Refuse EngineArgs that duck cannot combine with.

    Raises:
        DuckConfigError: names the flag, what is fine, what was given and why.
    """
    _check(args, ((limit, limit.argument) for limit in LIMITS))


def check_config(vllm_config: Any) -> None:
    """Refuse a finished VllmConfig that duck cannot run.

    Raises:
        DuckConfigError: names the flag, what is fine, what was given and why.
    """
    _check(vllm_config, ((limit, limit.field) for limit in LIMITS))


def one_of(values: Iterable[object]) -> str:
    return " or ".join(map(_text, values))


def _check(root: Any, limits: Iterable[tuple[Limit, str]]) -> None:
    for limit, path in limits:
        value = _at(root, path) if path else None
        if not _is_unset(value) and value not in limit.allowed:
            _refuse(limit, value)


def _at(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def _is_unset(value: object) -> bool:
    return value is None or (isinstance(value, Collection) and not value)


def _refuse(limit: Limit, value: object) -> NoReturn:
    expected = one_of(limit.allowed) if limit.allowed else "absent"
    raise DuckConfigError(
        f"duck needs {limit.flag} to be {expected}, got {_text(value)}: {limit.why}; "
        f"drop {limit.flag} or turn duck off"
    )


def _text(value: object) -> str:
    return value.name if isinstance(value, CUDAGraphMode) else repr(value)
