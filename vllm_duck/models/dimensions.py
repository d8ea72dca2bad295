"""The sizes of a model, read once from its Hugging Face config."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_duck.families import family_of
from vllm_duck.family import ModelFamily
from vllm_duck.models.config_values import (
    read_bool,
    read_int,
    refuse,
    require,
    require_bool,
    require_int,
    require_number,
)
from vllm_duck.models.index_layers import read_index_layers

# Keys of the rope parameters that are not read, and the one value that is computed
# here. Absent and null are fine.
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
    """Names are those of config.json, but for the first four."""

    family: ModelFamily
    # Layers with routed experts, MTP layers included.
    moe_layer_ids: tuple[int, ...]
    # Layers with an indexer, MTP layers included. Each of the others attends to what
    # the last layer with one before it has chosen.
    index_layer_ids: tuple[int, ...]
    # Whether the MTP layer chooses once for all of a step's drafts.
    shares_index_in_mtp: bool
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
    rms_norm_eps: float
    rope: RopeSettings

    @classmethod
    def from_hf_config(cls, config: Any) -> "Dimensions":
        """Read and check a `transformers` config object.

        Raises:
            DuckConfigError: another architecture, or a value that the family's models
                do not support.
        """
        family = family_of(getattr(config, "architectures", None))
        for name, expected in family.config_values.items():
            require(name, getattr(config, name, None), expected)
        read = partial(read_int, config)
        num_mtp = read("num_nextn_predict_layers", least=0, default=0)
        num_layers = read("num_hidden_layers")
        layers = range(num_layers + num_mtp)
        derived: dict[str, Any] = {
            "family": family,
            "moe_layer_ids": tuple(i for i in layers if family.is_moe_layer(read, i)),
            "index_layer_ids": read_index_layers(config, num_layers, num_mtp),
            "shares_index_in_mtp": read_bool(
                config, "index_share_for_mtp_iteration", default=False
            ),
            "num_nextn_predict_layers": num_mtp,
            "rope": read_rope(config),
        }
        values: dict[str, Any] = {
            name: getattr(config, name, None)
            for name in cls.__dataclass_fields__
            if name not in derived
        }
        dimensions = cls(**values, **derived)
        dimensions._check_layer_types(config)
        return dimensions

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if field.type is int and name != "num_nextn_predict_layers":
                require_int(name, value, least=1)
            if field.type is float and type(value) not in (int, float):
                refuse(name, "a number", value)
            if field.type is bool:
                require_bool(name, value)
        group_size, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or group_size < 2:
            refuse(
                "n_routed_experts",
                f"a multiple of n_group {self.n_group}, two in each group",
                self.n_routed_experts,
            )
        if self.topk_group > self.n_group:
            refuse("topk_group", f"<= n_group {self.n_group}", self.topk_group)
        if self.num_experts_per_tok > self.topk_group * group_size:
            refuse(
                "num_experts_per_tok",
                f"<= {self.topk_group * group_size}, the experts of topk_group groups",
                self.num_experts_per_tok,
            )

    @property
    def num_leading_dense(self) -> int:
        """Dense layers before the first layer with routed experts."""
        return min((*self.moe_layer_ids, self.num_hidden_layers))

    def is_choice_kept(self, layer_idx: int) -> bool:
        """Whether others attend to what the layer's indexer chooses."""
        if layer_idx >= self.num_hidden_layers:
            return self.shares_index_in_mtp
        behind = layer_idx + 1
        return behind < self.num_hidden_layers and behind not in self.index_layer_ids

    def _check_layer_types(self, config: Any) -> None:
        """The lists that newer configs have beside the numbers must say the same."""
        layers = range(self.num_hidden_layers)
        mlps = ["sparse" if i in self.moe_layer_ids else "dense" for i in layers]
        require("mlp_layer_types", getattr(config, "mlp_layer_types", None), mlps)
        attentions = [self.family.layer_type for _ in layers]
        require("layer_types", getattr(config, "layer_types", None), attentions)


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
    if not isinstance(parameters, Mapping):
        refuse("the rope's parameters", "an object", parameters)
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    if theta is None:
        refuse("rope_theta", "set", None)
    _check_rope_keys(parameters)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeSettings(theta=require_number("rope_theta", theta))
    # vLLM renames "yarn" to "deepseek_yarn" for models of this family.
    if kind not in ("yarn", "deepseek_yarn"):
        refuse("the rope type", '"yarn" or absent', kind)
    for name in ("factor", "original_max_position_embeddings"):
        if not parameters.get(name):
            refuse(f"{name} of the rope", "set for YaRN", parameters.get(name))

    def read(name: str, default: float = 0.0) -> float:
        return require_number(f"{name} of the rope", parameters.get(name) or default)

    return RopeSettings(
        theta=require_number("rope_theta", theta),
        factor=read("factor"),
        original_max_position=int(read("original_max_position_embeddings")),
        beta_fast=read("beta_fast", 32.0),
        beta_slow=read("beta_slow", 1.0),
        mscale=read("mscale"),
        mscale_all_dim=read("mscale_all_dim"),
    )


def _check_rope_keys(parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if name not in _ROPE_KEYS:
            require(f"{name} of the rope", value, _REQUIRED_ROPE.get(name))
