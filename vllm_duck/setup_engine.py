"""Turns a user's engine arguments into an engine with ducks, or says why it cannot.

`hooks` calls these functions around vLLM's own `create_engine_config`, in this order:
`duck_config`, `resolve`, `rewrite`, and `check` on what vLLM made of it. Nothing of the
user's is written: `rewrite` works on a copy, so that the arguments can be used again.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_duck.config import (
    ENDPOINTS_VARIABLE,
    HAND_OVER_KEY,
    KNOB,
    SETTINGS_KEY,
    DuckConfig,
    HandOver,
    environment_endpoints,
)
from vllm_duck.engine_environ import RUNNER_VARIABLE
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.wire.security import ClientSecurity
from vllm_duck.families import all_classes, all_families, family_of
from vllm_duck.family import ModelFamily
from vllm_duck.hub import local_model
from vllm_duck.limits import (
    LOAD_FORMAT,
    SCHEDULER_CLASS,
    check_arguments,
    check_config,
    one_of,
)
from vllm_duck.lost_ducks.health import health_file
from vllm_duck.lost_ducks.step_limit import check_step_limit
from vllm_duck.metrics import figures
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.platforms import host_platform
from vllm_duck.spec_decode import method

_KV_DTYPES = {
    "auto": "fp8",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8",
    "bfloat16": "bf16",
}


@dataclass(frozen=True)
class Resolved:
    """All that duck decided about an engine before anything was written."""

    config: DuckConfig
    hand_over: HandOver
    # A local directory.
    model: str
    family: ModelFamily
    # None: no MTP layer.
    speculative_config: dict[str, Any] | None


def duck_config(args: EngineArgs, environ: Mapping[str, str]) -> DuckConfig | None:
    """The user's settings, or None when duck is off.

    Duck is on when `additional_config` has a `duck` block, when the speculative method
    is duck_mtp or duck_mtp1, or when VLLM_DUCK_ENDPOINTS names ducks.

    Raises:
        DuckConfigError: a setting is wrong.
    """
    settings = (args.additional_config or {}).get(SETTINGS_KEY)
    is_on = settings is not None or method.is_asked_for(args)
    if not is_on and not environment_endpoints(environ):
        return None
    return DuckConfig.from_settings({} if settings is None else settings, environ)


def resolve(
    config: DuckConfig, args: EngineArgs, environ: Mapping[str, str]
) -> Resolved:
    """Check everything that can be checked before vLLM does; fetches a hub model.

    Raises:
        DuckConfigError: an option that duck cannot combine with, or a wrong model.
    """
    _check_surroundings(config, args, environ)
    check_arguments(args)
    kv_dtype = _kv_dtype(args)
    speculative_config = method.vllm_settings(args, is_shadow=config.mtp_shadow)
    model = local_model(args)
    checkpoint = Checkpoint(model)
    family = _served_family(checkpoint.config.get("architectures"))
    _check_checkpoint(checkpoint, needs_mtp=speculative_config is not None)
    return Resolved(
        config=config,
        hand_over=_hand_over(kv_dtype),
        model=model,
        family=family,
        speculative_config=speculative_config,
    )


def rewrite(args: EngineArgs, resolved: Resolved) -> EngineArgs:
    """A copy that points at duck's worker, model and loader."""
    # Deep: vLLM's platform writes into the records that the arguments hold.
    structured_outputs = args.structured_outputs_config
    args = copy.deepcopy(args)
    # But for the one where the API server looks for the reasoning parser afterwards.
    args.structured_outputs_config = structured_outputs
    if resolved.model != args.model:
        args.served_model_name = args.served_model_name or args.model
        if args.tokenizer_revision not in (None, args.revision):
            args.tokenizer = args.tokenizer or args.model
        args.model = resolved.model
    args.speculative_config = resolved.speculative_config
    args.spec_method = args.spec_tokens = None
    args.kv_cache_dtype = "auto"
    args.additional_config = {
        **(args.additional_config or {}),
        SETTINGS_KEY: resolved.config.to_settings(),
        HAND_OVER_KEY: asdict(resolved.hand_over),
    }
    args.worker_cls = host_platform().worker
    args.scheduler_cls = SCHEDULER_CLASS
    args.load_format = LOAD_FORMAT
    args.model_class_overrides = {
        **(args.model_class_overrides or {}),
        **resolved.family.classes,
    }
    return args


def check(vllm_config: VllmConfig) -> None:
    """Refuse what came another way than by arguments, before anything is loaded.

    Raises:
        DuckConfigError: an option that duck cannot combine with, another architecture,
            or sizes that are not supported.
    """
    check_config(vllm_config)
    model_config = vllm_config.model_config
    _served_family(model_config.architectures)
    dims = Dimensions.from_hf_config(model_config.hf_config)
    if dims.num_leading_dense == dims.num_hidden_layers:
        raise DuckConfigError(
            f"duck serves models with routed experts, and none of the "
            f"{dims.num_hidden_layers} layers has them by config.json"
        )


def is_duck_speculation(speculative_config: Any) -> bool:
    """Whether a SpeculativeConfig of vLLM is one that `rewrite` wrote."""
    overrides = speculative_config.target_model_config.model_class_overrides
    return any(
        overrides.get(family.mtp_architecture) == family.mtp_class
        for family in all_families()
    )


def _check_surroundings(
    config: DuckConfig, args: EngineArgs, environ: Mapping[str, str]
) -> None:
    """The platform, files, the environment, and names that are duck's own."""
    # Refuses a platform without a host.
    host_platform()
    check_step_limit(config)
    ClientSecurity.from_files(
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        token_file=config.token_file,
    )
    if environ.get(RUNNER_VARIABLE, "0") != "0":
        raise DuckConfigError(
            f"duck needs {RUNNER_VARIABLE}=0, got {environ[RUNNER_VARIABLE]!r}; "
            "unset it"
        )
    if HAND_OVER_KEY in (args.additional_config or {}):
        raise DuckConfigError(
            f"additional_config must have no {HAND_OVER_KEY!r}, which vllm_duck "
            f"writes itself; settings go into {KNOB}"
        )
    for name, model_class in (args.model_class_overrides or {}).items():
        if name in all_classes():
            raise DuckConfigError(
                f"duck brings its own model class for {name}, got {model_class!r}; "
                "drop it from --model-class-overrides or turn duck off"
            )


def _check_checkpoint(checkpoint: Checkpoint, *, needs_mtp: bool) -> None:
    if needs_mtp and checkpoint.config.get("num_nextn_predict_layers", 0) < 1:
        raise DuckConfigError(
            f"{method.METHODS[0]} and mtp_shadow need the checkpoint's MTP layer, and "
            f"{checkpoint.model_dir} has none (num_nextn_predict_layers); drop them"
        )
    # Raises where no duck could read the experts.
    _ = checkpoint.weight_format


def _served_family(architectures: object) -> ModelFamily:
    try:
        return family_of(architectures)
    except DuckConfigError as error:
        raise DuckConfigError(
            f"{error}; unset {KNOB} and {ENDPOINTS_VARIABLE} to serve this model "
            "without ducks"
        ) from error


def _hand_over(kv_dtype: Literal["fp8", "bf16"]) -> HandOver:
    folder = figures.temporary_folder()
    health = f"{folder}/health"
    # Made now: this process can read it, and the worker write, whatever /tmp becomes.
    health_file(health)
    return HandOver(kv_dtype, f"{folder}/figures.json", health)


def _kv_dtype(args: EngineArgs) -> Any:
    if args.kv_cache_dtype not in _KV_DTYPES:
        raise DuckConfigError(
            f"duck needs --kv-cache-dtype to be {one_of(_KV_DTYPES)}, got "
            f"{args.kv_cache_dtype!r}"
        )
    return _KV_DTYPES[args.kv_cache_dtype]
