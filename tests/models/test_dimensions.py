"""What a config.json may say, and which values are refused rather than mis-served."""

import json
from types import SimpleNamespace

import pytest

from vllm_duck.errors import DuckConfigError
from vllm_duck.models.dimensions import Dimensions


@pytest.fixture(scope="module")
def settings(tiny_model):
    return json.loads((tiny_model / "config.json").read_text())


def read(settings, **changes):
    return Dimensions.from_hf_config(SimpleNamespace(**{**settings, **changes}))


def test_the_checkpoint_s_own_names_are_read(settings):
    dims = read(settings)
    assert dims.kv_lora_rank == settings["kv_lora_rank"]
    assert dims.rope.factor == settings["rope_scaling"]["factor"]
    assert dims.moe_layer_ids == (1, 2, 3, 4)
    assert dims.num_leading_dense == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["indexed_attention"] * 4},
        {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        {"indexer_rope_interleave": None, "index_topk_freq": None, "mlp_bias": None},
        {"attention_dropout": 0.1, "ep_size": 8, "pretraining_tp": 2, "head_dim": 9},
        {"num_key_value_heads": 1, "output_router_logits": True},
        {"routed_scaling_factor": 2},
        {"norm_topk_prob": False},
        {"num_nextn_predict_layers": 0, "first_k_dense_replace": 0},
    ],
    ids=str,
)
def test_what_changes_nothing_or_is_computed_is_accepted(settings, changes):
    read(settings, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ({"is_causal": False}, "is_causal must be True, got False"),
        ({"rope_interleave": False}, "rope_interleave must be True, got False"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave must be False"),
        ({"index_topk_freq": 4}, "index_topk_freq must be 1, got 4"),
        ({"index_topk_pattern": "FSSS"}, "index_topk_pattern must be absent, got 'FS"),
        ({"indexer_types": ["full"]}, "indexer_types must be absent"),
        ({"sliding_window": 4096}, "sliding_window must be absent, got 4096"),
        ({"rswa_window": 128}, "rswa_window must be absent"),
        ({"swiglu_limit": 7.0}, "swiglu_limit must be absent, got 7.0"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types must be .'indexed_at",
        ),
        ({"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types must be .'dense'"),
        ({"q_lora_rank": None}, "q_lora_rank must be an integer >= 1, got None"),
        ({"n_shared_experts": None}, "n_shared_experts must be an integer >= 1"),
        ({"moe_layer_freq": [0, 1, 1, 1]}, "moe_layer_freq must be an integer >= 1"),
        ({"index_topk": 0}, "index_topk must be an integer >= 1, got 0"),
        ({"norm_topk_prob": None}, "norm_topk_prob must be true or false, got None"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor must be a number"),
        ({"n_group": 3}, "n_routed_experts must be a multiple of n_group 3"),
        ({"n_group": 16}, "n_routed_experts must be a multiple of .*, got 16"),
        ({"topk_group": 5}, "topk_group must be <= n_group 4, got 5"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be <= 8, the experts"),
    ],
    ids=str,
)
def test_what_would_be_mis_served_is_refused_by_name(settings, changes, message):
    with pytest.raises(DuckConfigError, match=f"config.json: {message}"):
        read(settings, **changes)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear", "factor": 2}, 'the rope type must be "yarn" or absent'),
        ({"type": "yarn"}, "factor of the rope must be set for YaRN, got None"),
        ({"attention_factor": 1.0}, "attention_factor of the rope must be absent"),
        ({"truncate": False}, "truncate of the rope must be True, got False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of the rope must be 1"),
        ({"mrope_section": [1, 2]}, "mrope_section of the rope must be absent"),
    ],
    ids=str,
)
def test_what_would_turn_otherwise_is_refused(settings, rope, message):
    with pytest.raises(DuckConfigError, match=message):
        read(settings, rope_scaling=rope)
    with pytest.raises(DuckConfigError, match=message):
        read(settings, rope_parameters={"rope_theta": 1e4, **rope})


def test_neutral_keys_of_the_rope_are_accepted(settings):
    neutral = {"truncate": True, "attention_factor": None, "attn_factor": 1.0}
    rope = {**settings["rope_scaling"], **neutral}
    assert read(settings, rope_scaling=rope) == read(settings)
