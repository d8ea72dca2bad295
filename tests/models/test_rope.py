"""Angles and scales against transformers, for every spelling of the config."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32RotaryEmbedding,
    apply_rotary_pos_emb,
    yarn_apply_mscale,
)

from testing.torch_host import rotate
from vllm_duck.errors import DuckConfigError
from vllm_duck.models.dimensions import RopeSettings, read_rope
from vllm_duck.models.rope import (
    Rope,
    half_split_to_interleaved,
    inverse_frequencies,
    softmax_scale,
)

OFFICIAL = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": OFFICIAL, "rope_theta": 10000},
        {"rope_parameters": {**OFFICIAL, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                **OFFICIAL,
                "rope_type": "deepseek_yarn",
                "rope_theta": 10000,
            },
            "rope_scaling": None,
        },
    ],
)
def test_every_spelling_of_yarn_gives_the_same_settings(spelling):
    settings = read_rope(SimpleNamespace(**spelling))
    assert settings == RopeSettings(10000.0, 40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    # 0.1 ln 40 + 1 = 1.3689, squared.
    assert softmax_scale(settings, 192) == pytest.approx(192**-0.5 * 1.873855, rel=1e-5)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5000},
        {"rope_theta": 5000, "rope_scaling": None, "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000}},
    ],
)
def test_every_spelling_of_plain_rope_gives_the_same_settings(spelling):
    settings = read_rope(SimpleNamespace(**spelling))
    assert settings == RopeSettings(5000.0)
    assert softmax_scale(settings, 192) == 192**-0.5


def test_other_rope_types_are_refused():
    config = SimpleNamespace(rope_scaling={"type": "linear"}, rope_theta=1e4)
    with pytest.raises(DuckConfigError, match="yarn.*got 'linear'"):
        read_rope(config)


def test_a_missing_theta_is_refused():
    with pytest.raises(DuckConfigError, match="rope_theta must be set"):
        read_rope(SimpleNamespace())


@pytest.mark.parametrize(
    "changes",
    [{}, {"mscale_all_dim": 0}, {"mscale": 0.7}, {"factor": 1.0}, {"beta_fast": 8}],
)
def test_yarn_matches_transformers(changes):
    parameters = {**OFFICIAL, "rope_type": "yarn", "rope_theta": 10000.0, **changes}
    config = DeepseekV32Config(
        head_dim=64, max_position_embeddings=163840, rope_parameters=parameters
    )
    settings = read_rope(SimpleNamespace(rope_parameters=parameters))
    oracle = DeepseekV32RotaryEmbedding(config)
    ours = Rope(settings, 64)
    torch.testing.assert_close(ours.inv_freq, oracle.inv_freq, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(oracle.attention_scaling, rel=1e-6)
    assert softmax_scale(settings, 192) == pytest.approx(
        yarn_apply_mscale(config.rope_parameters, 192**-0.5), rel=1e-6
    )


def test_half_split_heads_rotate_like_permuted_interleaved_ones():
    settings = RopeSettings(10000.0)
    torch.manual_seed(0)
    heads = torch.randn(5, 3, 64)
    positions = torch.arange(5) * 37
    angles = positions[:, None] * inverse_frequencies(settings, 64)
    angles = torch.cat([angles, angles], -1)
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos(), angles.sin())
    order = half_split_to_interleaved(64)
    got = rotate(heads[..., order], Rope(settings, 64).rotations(positions))
    torch.testing.assert_close(got, expected[..., order])
