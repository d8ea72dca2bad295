"""The sizes of a DeepSeek-V3.2 model, read once from its Hugging Face config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_duck.errors import DuckConfigError

# Keys of config.json that change what the model computes, and the one value that is
# computed here. Absent and null are fine.
# Sources: transformers 5.19.0, DeepseekV3Config and DeepseekV32Config; vLLM 0.32.0,
# models/deepseek_v32 and model_executor/models/deepseek_v2.py.
_REQUIRED: dict[str, object] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "is_causal": True,
    # Of the main attention, and of the indexer: its weights are permuted for it.
    "rope_interleave": True,
    "indexer_rope_interleave": False,
    # Layers that take another layer's choice of tokens, as in GLM-5.
    "index_topk_freq": 1,
    "index_topk_pattern": None,
    "indexer_types": None,
    "sliding_window": None,
    "rswa_window": None,
    "swiglu_limit": None,
}
_ATTENTION_TYPE = "indexed_attention"
# The same for keys of the rope parameters that are not read.
_REQUIRED_ROPE: dict[str, object] = {
    "attention_factor": None,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "partial_rotary_factor": 1,
    "truncate": True,
}
_ROPE_KEYS = (
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


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
        for name, expected in _REQUIRED.items():
            _require(name, getattr(config, name, None), expected)
        values: dict[str, Any] = {
            name: getattr(config, name, None)
            for name in cls.__dataclass_fields__
            if name not in ("rope", "moe_layer_freq", "num_nextn_predict_layers")
        }
        dimensions = cls(
            **values,
            moe_layer_freq=getattr(config, "moe_layer_freq", 1),
            num_nextn_predict_layers=getattr(config, "num_nextn_predict_layers", 0),
            rope=read_rope(config),
        )
        dimensions._check_layer_types(config)
        return dimensions

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            value, least = getattr(self, name), int(name not in _MAY_BE_ZERO)
            if field.type is int and (type(value) is not int or value < least):
                _refuse(name, f"an integer >= {least}", value)
            if field.type is float and type(value) not in (int, float):
                _refuse(name, "a number", value)
            if field.type is bool and type(value) is not bool:
                _refuse(name, "true or false", value)
        group_size, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or group_size < 2:
            _refuse(
                "n_routed_experts",
                f"a multiple of n_group {self.n_group}, two in each group",
                self.n_routed_experts,
            )
        if self.topk_group > self.n_group:
            _refuse("topk_group", f"<= n_group {self.n_group}", self.topk_group)
        if self.num_experts_per_tok > self.topk_group * group_size:
            _refuse(
                "num_experts_per_tok",
                f"<= {self.topk_group * group_size}, the experts of topk_group groups",
                self.num_experts_per_tok,
            )

    def is_moe_layer(self, layer_idx: int) -> bool:
        return (
            layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )

    def _check_layer_types(self, config: Any) -> None:
        """The lists that newer configs have beside the numbers must say the same."""
        layers = range(self.num_hidden_layers)
        mlps = ["sparse" if self.is_moe_layer(i) else "dense" for i in layers]
        _require("mlp_layer_types", getattr(config, "mlp_layer_types", None), mlps)
        attentions = [_ATTENTION_TYPE for _ in layers]
        _require("layer_types", getattr(config, "layer_types", None), attentions)


_MAY_BE_ZERO = ("num_nextn_predict_layers", "first_k_dense_replace")


def read_rope(config: Any) -> RopeSettings:
    """Read the rope settings from any of the three spellings in use.

    `rope_scaling` beside `rope_theta` (the official checkpoint), `rope_parameters`
    (transformers 5), or `rope_theta` alone (plain rope).

    Raises:
        DuckConfigError: a rope type other than plain and YaRN, or a key of it that
            would change the rotation and is not read.
    """
    parameters = getattr(config, "rope_parameters", None)
    parameters = parameters or getattr(config, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    if theta is None:
        _refuse("rope_theta", "set", None)
    _check_rope_keys(parameters)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeSettings(theta=float(theta))
    # vLLM renames "yarn" to "deepseek_yarn" for models of this family.
    if kind not in ("yarn", "deepseek_yarn"):
        _refuse("the rope type", '"yarn" or absent', kind)
    for name in ("factor", "original_max_position_embeddings"):
        if not parameters.get(name):
            _refuse(f"{name} of the rope", "set for YaRN", parameters.get(name))
    return RopeSettings(
        theta=float(theta),
        factor=float(parameters["factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        mscale=float(parameters.get("mscale") or 0),
        mscale_all_dim=float(parameters.get("mscale_all_dim") or 0),
    )


def _check_rope_keys(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name not in _ROPE_KEYS:
            _require(f"{name} of the rope", value, _REQUIRED_ROPE.get(name))


def _require(name: str, got: object, expected: object) -> None:
    if got is not None and got != expected:
        _refuse(name, "absent" if expected is None else repr(expected), got)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise DuckConfigError(
        f"config.json: {name} must be {expected}, got {got!r}; duck computes "
        "DeepSeek-V3.2 alone"
    )
