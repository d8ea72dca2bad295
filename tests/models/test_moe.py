"""The router against transformers, and the proxy to the ducks."""

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32TopkRouter,
)

from tests.models.test_attention import make_config
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.moe import RemoteMoe, Router


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_group": 1, "topk_group": 1},
        {"norm_topk_prob": False},
        {"n_routed_experts": 64, "n_group": 8, "num_experts_per_tok": 8},
    ],
)
def test_router_matches_transformers(changes):
    torch.manual_seed(0)
    config = make_config(**changes)
    oracle = DeepseekV32TopkRouter(config)
    oracle.weight.data.normal_(std=0.2)
    # A bias that reorders: chosen with it, weighed without it.
    oracle.e_score_correction_bias.copy_(torch.randn(config.n_routed_experts))
    ours = Router(Dimensions.from_hf_config(config))
    ours.weight.data.copy_(oracle.weight)
    ours.bias.data.copy_(oracle.e_score_correction_bias)
    hidden = torch.randn(200, config.hidden_size)
    with torch.inference_mode():
        _, expected_weights, expected_ids = oracle(hidden)
        ids, weights = ours(hidden)
    order, expected_order = ids.argsort(1), expected_ids.argsort(1)
    assert torch.equal(
        ids.gather(1, order).long(), expected_ids.gather(1, expected_order)
    )
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order)
    )
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32


class _RecordingDucks:
    def start(self, request):
        self.request = request
        return self

    def result(self):
        return np.full(self.request.hidden.shape, 2.0, dtype=np.float32)


def test_proxy_sends_the_bits_and_adds_the_shared_expert():
    torch.manual_seed(0)
    config = make_config()
    moe = RemoteMoe(Dimensions.from_hf_config(config), layer_idx=7).bfloat16()
    for parameter in moe.parameters():
        parameter.data.normal_(std=0.1)
    moe.router.float()
    moe.ducks = _RecordingDucks()
    hidden = torch.randn(5, config.hidden_size).bfloat16()
    with torch.inference_mode():
        got = moe.start(hidden).result()
        shared = moe.shared(hidden)
    request = moe.ducks.request
    assert request.layer_idx == 7
    assert np.array_equal(
        request.hidden, hidden.view(torch.int16).numpy().view(np.uint16)
    )
    assert torch.equal(got, (shared.float() + 2.0).bfloat16())
