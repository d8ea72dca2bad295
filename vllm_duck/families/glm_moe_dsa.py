"""GLM-5, 5.1, 5.2 and 5.3: DeepSeek-V3.2's attention, with indexers that layers share.

From 5.2 on most layers have no indexer: they attend to what the last layer with one has
chosen. The MTP layer has one, but neither embedding nor head.
"""

from dataclasses import replace

from vllm_duck.families.deepseek_v32 import FAMILY as DEEPSEEK_V32
from vllm_duck.family import Rule

FAMILY = replace(
    DEEPSEEK_V32,
    name="GLM-5",
    models=("GLM-5", "GLM-5.1", "GLM-5.2", "GLM-5.3"),
    architecture="GlmMoeDsaForCausalLM",
    rules=replace(
        DEEPSEEK_V32.rules,
        indexer=Rule("in full layers", {}),
        index_rope=Rule("interleaved", {"indexer_rope_interleave": True}),
    ),
    # Sources: transformers 5.19.0, GlmMoeDsaConfig; vLLM 0.32.0, models/deepseek_v32.
    required={**DEEPSEEK_V32.required, "moe_router_dtype": "float32"},
)
