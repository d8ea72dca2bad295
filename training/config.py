"""The shape of the tiny model, and its spelling in the official config.json."""

from dataclasses import asdict, dataclass, fields
from typing import Any

FP8_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """DeepSeek-V3.2's config fields, with the names of the official config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    q_lora_rank: int = 256
    # The 656-byte fp8 cache row of V3.2 fixes these four: 512 latents in four
    # scale groups, 64 rotary values; kernels are specialised on them.
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 640
    moe_intermediate_size: int = 128
    first_k_dense_replace: int = 1
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 4
    index_head_dim: int = 128
    # Small, so that prompts of everyday length already select a subset.
    index_topk: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 4.0
    rope_original_positions: int = 1024

    @property
    def max_position_embeddings(self) -> int:
        return int(self.rope_factor * self.rope_original_positions)

    def official(self, *, fp8: bool = True) -> dict[str, Any]:
        """Spell the config as deepseek-ai/DeepSeek-V3.2's config.json does."""
        sizes = asdict(self)
        factor = sizes.pop("rope_factor")
        original_positions = sizes.pop("rope_original_positions")
        spelled = {
            "architectures": ["DeepseekV32ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "deepseek_v32",
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 1,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": factor,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": original_positions,
                "type": "yarn",
            },
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
            **sizes,
        }
        if fp8:
            spelled["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            }
        return dict(sorted(spelled.items()))

    @classmethod
    def from_official(cls, spelled: dict[str, Any]) -> "TinyConfig":
        """Read the fields back from a config.json that official() wrote."""
        rope = spelled["rope_scaling"]
        own = {
            "rope_factor": rope["factor"],
            "rope_original_positions": rope["original_max_position_embeddings"],
        }
        names = {field.name for field in fields(cls)} - own.keys()
        return cls(**own, **{name: spelled[name] for name in names})
