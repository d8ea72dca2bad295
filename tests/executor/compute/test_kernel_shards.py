"""What a shard holds, skips and adds up to, and in which dtype the kernel answers."""

import numpy as np
import pytest

from testing.ducks.bf16 import f32_to_bf16
from testing.ducks.moe_reference import (
    Shard,
    assert_same_bits,
    make_expert,
    make_rows,
    make_shard,
    reference_bits,
    reference_f64,
)
from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.compute.kernel import WEIGHT_FORMATS, LayerWeights
from vllm_duck.executor.wire.bf16 import bf16_to_f32

FORMATS = WEIGHT_FORMATS


def test_bf16_output_is_the_fp32_output_rounded_once(kernel):
    rng = np.random.default_rng(16)
    shard = make_shard(rng)
    for num_rows in (1, 30):
        rows = make_rows(rng, shard, rows=num_rows)
        out = shard.forward(kernel, *rows)
        rounded = shard.forward(kernel, *rows, dtype=np.uint16)
        np.testing.assert_array_equal(rounded, f32_to_bf16(out))


def test_experts_of_other_shards_are_skipped(kernel):
    rng = np.random.default_rng(17)
    shard = make_shard(rng, experts=3, expert_lo=5, n_routed_experts=12)
    hidden, ids, weights = make_rows(rng, shard, rows=8, topk=6)
    ids[3] = [0, 1, 2, 3, 4, 11]
    rows = (hidden, ids, weights)
    out = shard.forward(kernel, *rows)
    assert_same_bits(out, reference_bits(shard, *rows))
    assert not out[3].any()


def test_column_slices_add_up_to_the_whole_expert(kernel):
    rng = np.random.default_rng(18)
    columns, edges = 208, (0, 48, 64, 144, 208)
    whole = make_shard(rng, experts=2, columns=columns)
    rows = make_rows(rng, whole, rows=5, topk=2)
    expected, bound = reference_f64(whole, *rows)
    total = np.zeros_like(expected)
    for lo, hi in zip(edges, edges[1:], strict=False):
        total += _slice(whole, lo, hi).forward(kernel, *rows)
    assert (np.abs(total - expected) <= 2 * bound).all()


def _slice(whole: Shard, lo: int, hi: int) -> Shard:
    weights = LayerWeights(
        num_experts=len(whole.experts),
        hidden_size=whole.weights.hidden_size,
        num_columns=hi - lo,
        column_offset=lo % 128,
        weight_format="e4m3-block128",
    )
    blocks = slice(lo // 128, (hi + 127) // 128)
    for idx, expert in enumerate(whole.experts):
        weights.load_expert(
            idx,
            gate=expert.gate[lo:hi],
            up=expert.up[lo:hi],
            down=expert.down[:, lo:hi],  # strided rows
            gate_scale=expert.gate_scale[blocks],
            up_scale=expert.up_scale[blocks],
            down_scale=expert.down_scale[:, blocks].copy(),
        )
    return Shard([], weights, 0, len(whole.experts))


def test_a_packed_slice_takes_at_most_three_percent_more_than_the_checkpoint():
    for columns, offset in ((64, 64), (48, 16), (2048, 0), (16, 112)):
        weights = LayerWeights(
            num_experts=2,
            hidden_size=7168,
            num_columns=columns,
            column_offset=offset,
            weight_format="e4m3-block128",
        )
        assert weights.resident_bytes <= 1.03 * weights.weight_bytes


def test_reloading_an_expert_replaces_it(kernel):
    rng = np.random.default_rng(19)
    shard = make_shard(rng, experts=2)
    rows = make_rows(rng, shard, rows=3, topk=2)
    shard.experts[1] = make_expert(rng, hidden=256, columns=64, offset=0)
    shard.weights.load_expert(1, **vars(shard.experts[1]))
    assert_same_bits(shard.forward(kernel, *rows), reference_bits(shard, *rows))


def test_first_touch_before_loading_changes_nothing(kernel):
    rng = np.random.default_rng(20)
    shard = make_shard(rng)
    kernel.first_touch(shard.weights)
    for idx, expert in enumerate(shard.experts):
        shard.weights.load_expert(idx, **vars(expert))
    rows = make_rows(rng, shard, rows=2)
    assert_same_bits(shard.forward(kernel, *rows), reference_bits(shard, *rows))


def test_no_rows_are_no_work(kernel):
    shard = make_shard(np.random.default_rng(21))
    rows = make_rows(np.random.default_rng(21), shard, rows=0)
    assert shard.forward(kernel, *rows).shape == (0, 256)


def test_hidden_rows_are_widened_exactly(kernel):
    # A sanity check of the references themselves: float64 and float32 order agree.
    rng = np.random.default_rng(23)
    shard = make_shard(rng)
    rows = make_rows(rng, shard, rows=2)
    expected, bound = reference_f64(shard, *rows)
    assert (np.abs(reference_bits(shard, *rows) - expected) <= bound).all()
    assert bf16_to_f32(rows[0]).dtype == np.float32


def test_a_layer_with_a_missing_expert_is_refused(kernel):
    rng = np.random.default_rng(24)
    shard = make_shard(rng, experts=2)
    incomplete = LayerWeights(
        num_experts=2,
        hidden_size=256,
        num_columns=64,
        column_offset=0,
        weight_format="e4m3-block128",
    )
    incomplete.load_expert(0, **vars(shard.experts[0]))
    rows = make_rows(rng, shard, rows=1, topk=2)
    with pytest.raises(DuckCheckpointError, match="expert 1 of the shard was never"):
        Shard([], incomplete, 0, 2).forward(kernel, *rows)
