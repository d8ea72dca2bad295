"""DeepSeek-V3.2: MLA with the lightning indexer, routed experts, one MTP layer."""

from vllm_duck.family import ModelFamily, ReadInt, TensorNames


def is_moe_layer(read_int: ReadInt, layer_idx: int) -> bool:
    num_dense = read_int("first_k_dense_replace", least=0)
    step = read_int("moe_layer_freq", default=1)
    return layer_idx >= num_dense and layer_idx % step == 0


FAMILY = ModelFamily(
    name="DeepSeek-V3.2",
    architecture="DeepseekV32ForCausalLM",
    mtp_architecture="DeepseekV32MTPModel",
    model_class="vllm_duck.models.target:TargetForCausalLM",
    mtp_class="vllm_duck.models.mtp:MtpDraftModel",
    is_moe_layer=is_moe_layer,
    tensors=TensorNames(
        embedding="model.embed_tokens",
        norm="model.norm",
        head="lm_head",
        layers="model.layers",
        experts="mlp.experts",
        projections={"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        mtp_embedding="embed_tokens",
        mtp_head="shared_head.head",
        mtp_embedding_norm="enorm",
        mtp_hidden_norm="hnorm",
        mtp_projection="eh_proj",
        mtp_norm="shared_head.norm",
    ),
    # Sources: transformers 5.19.0, DeepseekV3Config and DeepseekV32Config; vLLM 0.32.0,
    # models/deepseek_v32 and model_executor/models/deepseek_v2.py.
    required={
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
    },
    layer_type="indexed_attention",
)
