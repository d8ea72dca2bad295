"""DeepSeek-V3.2: MLA with the lightning indexer, routed experts, one MTP layer."""

from vllm_duck.family import LayerRules, ModelFamily, ReadInt, Rule, TensorNames


def is_moe_layer(read_int: ReadInt, layer_idx: int) -> bool:
    num_dense = read_int("first_k_dense_replace", least=0)
    step = read_int("moe_layer_freq", default=1)
    return layer_idx >= num_dense and layer_idx % step == 0


FAMILY = ModelFamily(
    name="DeepSeek-V3.2",
    models=("DeepSeek-V3.2",),
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
    rules=LayerRules(
        router=Rule("noaux_tc", {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        indexer=Rule(
            "in every layer",
            {"index_topk_freq": 1, "index_topk_pattern": None, "indexer_types": None},
        ),
        rope=Rule("interleaved", {"rope_interleave": True}),
        index_rope=Rule("half-split", {"indexer_rope_interleave": False}),
    ),
    # Sources: transformers 5.19.0, DeepseekV3Config and DeepseekV32Config; vLLM 0.32.0,
    # models/deepseek_v32 and model_executor/models/deepseek_v2.py.
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "is_causal": True,
        "sliding_window": None,
        "rswa_window": None,
        "swiglu_limit": None,
    },
    layer_type="indexed_attention",
)
