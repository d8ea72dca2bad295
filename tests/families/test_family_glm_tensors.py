"""GLM-5's and 5.2's real tensors, without their weights: names and shapes.

What the loaders ask for against public sources:
- the trunk: transformers 5.19.0, GlmMoeDsaForCausalLM in the real sizes, which loads
  these checkpoints; it stacks the routed experts;
- the routed experts, the MTP layer's own names: vLLM 0.32.0, models/deepseek_v32;
- which layers have an indexer, seven tensors of it in fp8 (wk and wq_b with scales):
  https://github.com/ROCm/ATOM/pull/1260, "57 shared layers' indexer params (= 399)".
Not verified, as no header of a real file was at hand: the dtype of each tensor (the
loaders take e4m3 with scales, bf16 and fp32 wherever they take one), and whether the
repositories hold further tensors, which would be left unread.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from testing.families.glm import GLM_5_2
from testing.paged_world import PagedWorld
from vllm_duck.families import family_of
from vllm_duck.models.cpu.layer import CpuLayer
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches

# 5.1 says of indexers only that RoPE is interleaved: every layer has one.
GLM_5 = {
    key: value
    for key, value in GLM_5_2.items()
    if not key.startswith(("index_topk_", "index_skip", "index_share", "indexer_types"))
} | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
MODELS = pytest.mark.parametrize("config", [GLM_5, GLM_5_2], ids=["5.1", "5.2"])
MTP = 78


def asked_for(config):
    """What the host asks for of the layers, by name: its shape."""
    dims = Dimensions.from_hf_config(SimpleNamespace(**config))
    found = {}
    with PagedWorld().building():
        for i in range(dims.num_hidden_layers + 1):
            name = f"model.layers.{i}"
            has_indexer = i in dims.index_layer_ids
            caches = LayerCaches.of(dims, "fp8", name, has_indexer=has_indexer)
            layer = CpuLayer(dims, i, caches)
            found |= {n: tuple(v.shape) for n, v in layer.checkpoint_views(name)}
    return found


def published(config):
    """What transformers has of the layers, but for routed experts."""
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**config))
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.") and ".experts." not in name
    }


@MODELS
def test_the_host_asks_for_all_of_the_trunk_and_nothing_else(config):
    asked = asked_for(config)
    mtp = f"model.layers.{MTP}."
    trunk = {name: shape for name, shape in asked.items() if not name.startswith(mtp)}
    assert trunk == published(config)
    # The MTP layer is one more MoE layer, with an indexer.
    full = "model.layers.74."
    last = {name.removeprefix(full) for name in trunk if name.startswith(full)}
    assert {name.removeprefix(mtp) for name in asked if name.startswith(mtp)} == last


@pytest.mark.parametrize(("config", "num_layers"), [(GLM_5, 79), (GLM_5_2, 79 - 57)])
def test_so_many_layers_have_an_indexer(config, num_layers):
    """In fp8 seven tensors each: 553 in GLM-5.1, 399 fewer in 5.2."""
    names = [name for name in asked_for(config) if ".indexer." in name]
    num_scales = sum(name.endswith(("wk.weight", "wq_b.weight")) for name in names)
    assert len(names) + num_scales == 7 * num_layers


def test_ducks_ask_for_the_experts_and_mtp_by_these_names():
    names = family_of(GLM_5_2["architectures"]).tensors
    assert names.expert(3, 255, "up") == "model.layers.3.mlp.experts.255.up_proj"
    own = (names.mtp_embedding_norm, names.mtp_hidden_norm, names.mtp_projection)
    assert (*own, names.mtp_norm) == ("enorm", "hnorm", "eh_proj", "shared_head.norm")
