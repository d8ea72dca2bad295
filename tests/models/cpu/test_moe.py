"""The router against transformers, and the proxy to the ducks."""

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32TopkRouter,
)

from testing import torch_host
from testing.attention_pair import make_config
from testing.filled import filled
from vllm_duck.executor.duck import CallTimes, MoeSum
from vllm_duck.models.cpu.moe import RemoteMoe, Router
from vllm_duck.models.cpu.threads import from_bits
from vllm_duck.models.dimensions import Dimensions


def bits(x):
    return x.view(torch.int16).numpy().view(np.uint16)


def make_router(dims, weight, bias):
    router = Router(dims)
    router.weight.data.copy_(weight)
    router.bias.data.copy_(bias)
    router.finish_loading()
    return router


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_group": 1, "topk_group": 1},
        {"norm_topk_prob": False},
        {"n_routed_experts": 64, "n_group": 8, "num_experts_per_tok": 8},
        # Neither hidden size nor experts fill the kernels' tiles.
        {"hidden_size": 72, "n_routed_experts": 12},
    ],
)
def test_router_matches_transformers(changes):
    torch.manual_seed(0)
    config = make_config(**changes)
    oracle = DeepseekV32TopkRouter(config)
    oracle.weight.data.normal_(std=0.2)
    # A bias that reorders: chosen with it, weighed without it.
    oracle.e_score_correction_bias.copy_(torch.randn(config.n_routed_experts))
    ours = make_router(
        Dimensions.from_hf_config(config), oracle.weight, oracle.e_score_correction_bias
    )
    hidden = torch.randn(200, config.hidden_size).bfloat16()
    with torch.inference_mode():
        _, expected_weights, expected_ids = oracle(hidden.float())
    ids, weights = map(torch.from_numpy, ours(bits(hidden)))
    order, expected_order = ids.argsort(1), expected_ids.argsort(1)
    assert torch.equal(
        ids.gather(1, order.long()).long(), expected_ids.gather(1, expected_order)
    )
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order)
    )
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("num_groups", [1, 2])
def test_of_equal_experts_the_lower_ids_win(num_groups):
    config = make_config(n_routed_experts=8, n_group=num_groups, topk_group=1)
    dims = Dimensions.from_hf_config(config)
    router = make_router(dims, torch.zeros(8, dims.hidden_size), torch.zeros(8))
    ids, weights = router(np.ones((3, dims.hidden_size), np.uint16))
    assert ids.tolist() == [[0, 1]] * 3
    assert (weights == 0.5 * dims.routed_scaling_factor).all()


class _RecordingDucks:
    def send(self, request):
        self.request = request
        return self

    def is_done(self):
        return True

    def wait(self):
        total = np.full(self.request.hidden.shape, 2.0, dtype=np.float32)
        return MoeSum(total, CallTimes(0, 90, 60, 30))


def test_proxy_sends_the_bits_and_adds_the_shared_expert():
    torch.manual_seed(0)
    config = make_config()
    dims = Dimensions.from_hf_config(config)
    moe = RemoteMoe(dims, layer_idx=7)
    filled(moe.router)
    weights = filled(moe.shared)
    gate_up = torch.cat([weights["gate_proj"], weights["up_proj"]])
    down = weights["down_proj"]
    moe.ducks = _RecordingDucks()
    hidden = torch.randn(5, config.hidden_size).bfloat16()
    residual = torch.randn(5, config.hidden_size).bfloat16()
    got_bits, call = moe.stage0(bits(hidden), bits(residual)).wait()
    got = from_bits(got_bits)
    assert call.compute_us == 60
    request = moe.ducks.request
    assert request.layer_idx == 7
    assert np.array_equal(request.hidden, bits(hidden))
    expected = residual.float() + torch_host.mlp(hidden.float(), gate_up, down) + 2.0
    # One rounding of the activation and one of the sum, 8 bits each.
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=2**-8)
