"""The sizes of a DeepSeek-V3.2 model, read once from its Hugging Face config."""

from dataclasses import dataclass
from typing import Any

from vllm_duck.errors import DuckConfigError


@dataclass(frozen=True)
class RopeSettings:
    """Rotary embedding: plain when `factor` is 1, YaRN otherwise."""

    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def is_yarn(self) -> bool:
        return self.original_max_position > 0


@dataclass(frozen=True)
class Dimensions:
    """Names are the checkpoint's; see config.json of DeepSeek-V3.2."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSettings

    @classmethod
    def from_hf_config(cls, config: Any) -> "Dimensions":
        """Read and check a `transformers` config object.

        Raises:
            DuckConfigError: a value that this model does not support.
        """
        _require(config, "scoring_func", "sigmoid")
        _require(config, "topk_method", "noaux_tc")
        _require(config, "hidden_act", "silu")
        if getattr(config, "attention_bias", False):
            raise DuckConfigError(
                "config.json: attention_bias must be false, got true; "
                "DeepSeek-V3.2 has no attention biases"
            )
        values = {
            name: getattr(config, name)
            for name in cls.__dataclass_fields__
            if name not in ("rope", "moe_layer_freq", "num_nextn_predict_layers")
        }
        dimensions = cls(
            **values,
            moe_layer_freq=getattr(config, "moe_layer_freq", 1),
            num_nextn_predict_layers=getattr(config, "num_nextn_predict_layers", 0),
            rope=read_rope(config),
        )
        if dimensions.n_routed_experts % dimensions.n_group:
            raise DuckConfigError(
                f"config.json: n_routed_experts must be a multiple of n_group, got "
                f"{dimensions.n_routed_experts} and {dimensions.n_group}"
            )
        return dimensions

    def is_moe_layer(self, layer_idx: int) -> bool:
        return (
            layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )


def read_rope(config: Any) -> RopeSettings:
    """Read the rope settings from any of the three spellings in use.

    `rope_scaling` beside `rope_theta` (the official checkpoint), `rope_parameters`
    (transformers 5), or `rope_theta` alone (plain rope).

    Raises:
        DuckConfigError: a rope type other than plain and YaRN.
    """
    parameters = getattr(config, "rope_parameters", None)
    parameters = parameters or getattr(config, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    if theta is None:
        raise DuckConfigError("config.json: rope_theta must be set, got nothing")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeSettings(theta=float(theta))
    # vLLM renames "yarn" to "deepseek_yarn" for models of this family.
    if kind not in ("yarn", "deepseek_yarn"):
        raise DuckConfigError(
            f'config.json: the rope type must be "yarn" or absent, got {kind!r}'
        )
    return RopeSettings(
        theta=float(theta),
        factor=float(parameters["factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        mscale=float(parameters.get("mscale") or 0),
        mscale_all_dim=float(parameters.get("mscale_all_dim") or 0),
    )


def _require(config: Any, name: str, expected: object) -> None:
    got = getattr(config, name, expected)
    if got != expected:
        raise DuckConfigError(f"config.json: {name} must be {expected!r}, got {got!r}")
