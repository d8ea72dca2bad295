"""Turns a user's engine arguments into an engine with ducks, or says why it cannot.

`hooks` calls these four functions around vLLM's own `create_engine_config`.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_duck import figures
from vllm_duck.config import ENDPOINTS_VARIABLE, KNOB, DuckConfig
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.checkpoint import Checkpoint
from vllm_duck.executor.security import ClientSecurity
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.spec_decode import method

LOAD_FORMAT = "duck"
ARCHITECTURE = "DeepseekV32ForCausalLM"
MODEL_CLASS = "vllm_duck.models.deepseek_v32:DeepseekV32ForCausalLM"
MTP_ARCHITECTURE = "DeepseekV32MTPModel"
MTP_CLASS = "vllm_duck.models.mtp:DeepseekV32Mtp"
MODEL_CLASSES = {ARCHITECTURE: MODEL_CLASS, MTP_ARCHITECTURE: MTP_CLASS}
WORKER_CLASS = "vllm_duck.worker.DuckWorker"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

_FP8_SPELLINGS = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")

# Each option duck cannot combine with: attribute of EngineArgs, the values that are
# fine, and the flag that a user would have typed.
_UNSUPPORTED = (
    ("pipeline_parallel_size", (1,), "--pipeline-parallel-size"),
    ("tensor_parallel_size", (1,), "--tensor-parallel-size"),
    ("data_parallel_size", (1,), "--data-parallel-size"),
    ("decode_context_parallel_size", (1,), "--decode-context-parallel-size"),
    ("enable_expert_parallel", (False,), "--enable-expert-parallel"),
    # `vllm serve` leaves None where LLM(...) has False.
    ("enable_lora", (False, None), "--enable-lora"),
    ("enable_dbo", (False,), "--enable-dbo"),
    ("enable_sleep_mode", (False,), "--enable-sleep-mode"),
    ("kv_transfer_config", (None,), "--kv-transfer-config"),
    ("quantization", (None, "fp8"), "--quantization"),
    ("load_format", ("auto", "safetensors", LOAD_FORMAT), "--load-format"),
    ("worker_cls", ("auto", WORKER_CLASS), "--worker-cls"),
    ("dtype", ("auto", "bfloat16"), "--dtype"),
)
_FULL_GRAPHS = (
    CUDAGraphMode.FULL,
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
)


def duck_config(args: EngineArgs, environ: Mapping[str, str]) -> DuckConfig | None:
    """The user's settings, or None when duck is off.

    Duck is on when `additional_config` has a `duck` block, when the speculative method
    is duck_mtp1, or when VLLM_DUCK_ENDPOINTS names ducks.

    Raises:
        DuckConfigError: a setting is wrong.
    """
    settings = (args.additional_config or {}).get("duck")
    is_on = settings is not None or method.is_duck_method(args.speculative_config)
    if not is_on and not environ.get(ENDPOINTS_VARIABLE):
        return None
    return DuckConfig.from_settings({} if settings is None else settings, environ)


def apply(
    config: DuckConfig, args: EngineArgs, environ: MutableMapping[str, str]
) -> None:
    """Point the engine arguments at duck's worker, model and loader.

    Raises:
        DuckConfigError: an option that duck cannot combine with.
    """
    if not current_platform.is_cpu():
        raise DuckConfigError(
            "duck's attention needs the CPU platform in this version, got "
            f"{current_platform.device_name}; install vllm_duck[cpu]"
        )
    ClientSecurity.from_files(
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        token_file=config.token_file,
    )
    for name, allowed, flag in _UNSUPPORTED:
        value = getattr(args, name)
        if value not in allowed:
            raise DuckConfigError(
                f"duck needs {flag} to be {_one_of(allowed)}, got {value!r}; "
                f"drop {flag} or turn duck off"
            )
    mode = args.compilation_config.cudagraph_mode
    if mode in _FULL_GRAPHS:
        raise DuckConfigError(
            f"duck needs cudagraph_mode NONE or PIECEWISE, got {mode.name}, which "
            f"would not replay the calls to the ducks; set --compilation-config"
        )
    if environ.get(RUNNER_VARIABLE, "0") != "0":
        raise DuckConfigError(
            f"duck needs {RUNNER_VARIABLE}=0, got {environ[RUNNER_VARIABLE]!r}; "
            "unset it"
        )
    environ[RUNNER_VARIABLE] = "0"
    if not Path(args.model).is_dir():
        args.served_model_name = args.served_model_name or args.model
        args.model = _download(args)
    num_drafts = _set_speculation(config, args)
    config = replace(
        config,
        kv_dtype=_kv_dtype(args),
        num_drafts=num_drafts,
        figures_file=config.figures_file or figures.temporary_file(),
    )
    args.kv_cache_dtype = "auto"
    args.additional_config = {
        **(args.additional_config or {}),
        "duck": config.to_settings(),
    }
    args.worker_cls = WORKER_CLASS
    args.load_format = LOAD_FORMAT
    args.model_class_overrides = {
        **(args.model_class_overrides or {}),
        **MODEL_CLASSES,
    }


def check(vllm_config: VllmConfig) -> None:
    """Refuse a model that duck cannot serve, before anything is loaded.

    Raises:
        DuckConfigError: another architecture, or sizes that are not supported.
    """
    model_config = vllm_config.model_config
    _require_architecture(model_config.architectures)
    Dimensions.from_hf_config(model_config.hf_config)


def is_duck_speculation(speculative_config: Any) -> bool:
    """Whether a SpeculativeConfig of vLLM is one that `apply` wrote."""
    overrides = speculative_config.target_model_config.model_class_overrides
    return overrides.get(MTP_ARCHITECTURE) == MTP_CLASS


def _set_speculation(config: DuckConfig, args: EngineArgs) -> int:
    """Tell vLLM's own name of the method; returns the drafts of a step.

    Raises:
        DuckConfigError: another method, a contradiction, or nothing to draft with.
    """
    settings = args.speculative_config
    is_given = method.is_duck_method(settings)
    if settings and not is_given and not method.is_rewritten(settings):
        raise DuckConfigError(
            f"duck needs --speculative-config to be absent or to name the method "
            f"{method.METHOD}, got {settings!r}"
        )
    for name in ("spec_method", "spec_model", "spec_tokens"):
        if getattr(args, name) is not None:
            raise DuckConfigError(
                f"duck takes its method by --speculative-config alone, got "
                f"--{name.replace('_', '-')} {getattr(args, name)!r}; drop it"
            )
    if is_given and config.mtp_shadow:
        raise DuckConfigError(
            f"duck.mtp_shadow decodes plainly, got it beside {method.METHOD}, which "
            f'drafts; drop {KNOB}["mtp_shadow"] or --speculative-config'
        )
    if not settings and not config.mtp_shadow:
        if config.num_drafts:
            raise DuckConfigError(
                f"duck.num_drafts must come from --speculative-config, got "
                f'{config.num_drafts}; drop {KNOB}["num_drafts"]'
            )
        return 0
    checkpoint = Checkpoint(args.model)
    _require_architecture(checkpoint.config.get("architectures") or [])
    if checkpoint.config.get("num_nextn_predict_layers", 0) < 1:
        raise DuckConfigError(
            f"{method.METHOD} and mtp_shadow need the checkpoint's MTP layer, and "
            f"{args.model} has none (num_nextn_predict_layers); drop them"
        )
    args.speculative_config = method.vllm_settings(settings if is_given else None)
    return method.NUM_DRAFTS


def _require_architecture(architectures: list[str]) -> None:
    if ARCHITECTURE not in architectures:
        raise DuckConfigError(
            f"duck serves {ARCHITECTURE}, got {architectures}; unset {KNOB} and "
            f"{ENDPOINTS_VARIABLE} to serve this model without ducks"
        )


def _kv_dtype(args: EngineArgs) -> Any:
    if args.kv_cache_dtype in _FP8_SPELLINGS:
        return "fp8"
    if args.kv_cache_dtype == "bfloat16":
        return "bf16"
    raise DuckConfigError(
        f"duck needs --kv-cache-dtype to be {_one_of((*_FP8_SPELLINGS, 'bfloat16'))}, "
        f"got {args.kv_cache_dtype!r}"
    )


def _download(args: EngineArgs) -> str:
    """Fetch a model of the Hugging Face hub; returns its directory."""
    from huggingface_hub import snapshot_download

    path: str = snapshot_download(args.model, revision=args.revision)
    return path


def _one_of(values: tuple[object, ...]) -> str:
    return " or ".join(repr(value) for value in values)
