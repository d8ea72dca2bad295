"""Re-quantised experts: what the codes are, how far off, and the same by every way."""

from dataclasses import replace

import numpy as np
import pytest

from testing.ducks.bf16 import f32_to_bf16
from testing.ducks.mini_model import make_mini_model, make_request, make_summary
from testing.ducks.moe_reference import (
    E4M3,
    Expert,
    dense_grouped,
    grouped_codes,
    make_expert,
    random_codes,
)
from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.compute.kernel import (
    BLOCK,
    GROUP_SIZES,
    LayerWeights,
    MoeKernel,
)
from vllm_duck.executor.compute.requantize import load_expert, requantize_expert
from vllm_duck.executor.duck import REQUANTIZED_FORMATS, Shard
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.split.loader import SplitDirectory
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard, shard_bytes
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.wire.bf16 import bf16_to_f32

CHOICES = tuple(REQUANTIZED_FORMATS)
FORMATS = tuple(GROUP_SIZES)
SOURCES = ("e4m3-block128", "bf16")
PLAN = ShardPlan(
    160, 4, (Shard(0, 112, 0, 4), Shard(112, 160, 0, 1), Shard(112, 160, 1, 4))
)


def _arrays(expert: Expert) -> dict[str, np.ndarray]:
    return {key: value for key, value in vars(expert).items() if value is not None}


def _weights(expert: Expert, offset: int) -> list[np.ndarray]:
    """Gate, up and down in float32, products with the scales rounded as in C."""
    if expert.gate_scale is None:
        return [bf16_to_f32(w) for w in (expert.gate, expert.up, expert.down)]
    column = (offset + np.arange(len(expert.gate))) // BLOCK
    row = np.arange(len(expert.down)) // BLOCK
    return [
        np.float32(E4M3[expert.gate]) * expert.gate_scale[np.ix_(column, row)],
        np.float32(E4M3[expert.up]) * expert.up_scale[np.ix_(column, row)],
        np.float32(E4M3[expert.down]) * expert.down_scale[np.ix_(row, column)],
    ]


def _reference(weights, first, weight_format):
    """Codes and scales of one matrix, group by group."""
    group_size = GROUP_SIZES[weight_format]
    group = (first + np.arange(weights.shape[1])) // group_size
    codes, scales = np.zeros(weights.shape), []
    for g in np.unique(group):
        part = weights[:, group == g]
        peak = np.take_along_axis(part, np.abs(part).argmax(1)[:, None], 1)
        if weight_format == "int4-group32":
            low, high, exact = -8, 7, peak / np.float32(-8)
        else:
            low, high, exact = -127, 127, np.abs(peak) / np.float32(127)
        scale = bf16_to_f32(f32_to_bf16(exact))
        inverse = np.float32(1) / scale
        codes[:, group == g] = np.clip(np.rint(part * inverse), low, high)
        scales.append(scale[:, 0])
    return codes, np.stack(scales, axis=1)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", [(256, 128, 0), (272, 48, 16), (144, 272, 112)])
def test_codes_are_those_of_the_obvious_reference(source, weight_format, shape):
    hidden, columns, offset = shape
    expert = make_expert(
        np.random.default_rng(1),
        hidden=hidden,
        columns=columns,
        offset=offset,
        weight_format=source,
    )
    made = requantize_expert(
        _arrays(expert), column_offset=offset, weight_format=weight_format
    )
    weights = _weights(expert, offset)
    for key, first, matrix in zip(
        ("gate", "up", "down"), (0, 0, offset), weights, strict=True
    ):
        codes, scales = _reference(matrix, first, weight_format)
        np.testing.assert_array_equal(grouped_codes(made[key], weight_format), codes)
        np.testing.assert_array_equal(bf16_to_f32(made[f"{key}_scale"]), scales)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("weight_format", "rms"), [(FORMATS[0], 0.0066), (FORMATS[1], 0.088)]
)
def test_errors_are_as_stated(source, weight_format, rms):
    rng = np.random.default_rng(2)
    hidden, columns, offset = 512, 144, 48
    expert = make_expert(
        rng, hidden=hidden, columns=columns, offset=offset, weight_format=source
    )
    layer = LayerWeights(
        num_experts=1,
        hidden_size=hidden,
        num_columns=columns,
        column_offset=offset,
        weight_format=weight_format,
    )
    made = Expert(
        **requantize_expert(
            _arrays(expert), column_offset=offset, weight_format=weight_format
        )
    )
    pairs = zip(_weights(expert, offset), dense_grouped(layer, made), strict=True)
    for (weights, got), first in zip(pairs, (0, 0, offset), strict=True):
        error = np.abs(got - weights)
        _, scales = _reference(weights, first, weight_format)
        size = GROUP_SIZES[weight_format]
        group = (first + np.arange(weights.shape[1])) // size - first // size
        steps = error / np.abs(scales[:, group])
        assert steps.max() <= (1.04 if weight_format == "int4-group32" else 0.501)
        if source == "bf16":  # these are drawn from a normal distribution
            assert np.sqrt((error**2).mean() / (weights**2.0).mean()) < rms


@pytest.mark.parametrize("weight_format", FORMATS)
def test_groups_of_nothing_and_of_almost_nothing_are_zero(weight_format):
    weights = np.zeros((32, 32), np.float32)
    weights[1] = 2.0**-126
    weights[2, 5] = -1.0
    bits = f32_to_bf16(weights)
    made = requantize_expert(
        {"gate": bits, "up": bits, "down": bits},
        column_offset=0,
        weight_format=weight_format,
    )
    codes = grouped_codes(made["gate"], weight_format)
    scales = bf16_to_f32(made["gate_scale"])[:, 0]
    assert not codes[:2].any()
    assert not scales[:2].any()
    assert codes[2, 5] * scales[2] == pytest.approx(-1, rel=2**-8)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_weight_that_is_not_finite_is_refused(source, weight_format):
    rng = np.random.default_rng(3)
    expert = make_expert(rng, hidden=64, columns=32, offset=0, weight_format=source)
    expert.down[3, 7] = 0xFF if source == "e4m3-block128" else 0x7F80
    layer = LayerWeights(
        num_experts=1,
        hidden_size=64,
        num_columns=32,
        column_offset=0,
        weight_format=weight_format,
    )
    with pytest.raises(DuckCheckpointError, match="down_proj must be finite to become"):
        load_expert(layer, 0, _arrays(expert))
    with pytest.raises(DuckCheckpointError, match="never loaded"):
        layer.check()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_scale_that_is_not_finite_is_refused(weight_format):
    rng = np.random.default_rng(4)
    expert = make_expert(
        rng, hidden=64, columns=32, offset=0, weight_format=weight_format
    )
    expert.up_scale[5, 0] = 0x7F80
    layer = LayerWeights(
        num_experts=1,
        hidden_size=64,
        num_columns=32,
        column_offset=0,
        weight_format=weight_format,
    )
    with pytest.raises(DuckCheckpointError, match=r"up_proj\.weight_scale must be"):
        load_expert(layer, 0, _arrays(expert))


def test_rows_of_a_larger_array_are_taken_as_they_lie():
    rng = np.random.default_rng(5)
    wide = random_codes(rng, (64, 96))
    ones = np.ones((1, 1), np.float32)
    arrays = {"gate": wide[:32, :64], "up": wide[:32, 16:80], "down": wide[:, 32:64]}
    scales = {f"{key}_scale": ones for key in arrays}
    whole = {key: array.copy() for key, array in arrays.items()}
    made, expected = (
        requantize_expert(
            {**each, **scales}, column_offset=0, weight_format="int4-group32"
        )
        for each in (arrays, whole)
    )
    for key, array in expected.items():
        np.testing.assert_array_equal(made[key], array)


@pytest.mark.parametrize("choice", CHOICES)
def test_splitting_and_loading_make_the_same_experts(tmp_path, any_model, choice):
    checkpoint = Checkpoint(any_model.write(tmp_path / "model"))
    as_is, requantized = (
        split_checkpoint(
            checkpoint, PLAN, tmp_path / name, weight_format=how, show_progress=False
        )
        for name, how in (("as-is", None), ("requantized", choice))
    )
    for shard, plain, made in zip(
        PLAN.shards, as_is.directories, requantized.directories, strict=True
    ):
        split = SplitDirectory(made)
        ways = [
            load_shard(checkpoint, shard, weight_format=choice, show_progress=False),
            SplitDirectory(plain).load(weight_format=choice, show_progress=False),
            split.load(show_progress=False),
            split.load(weight_format=choice, show_progress=False),
        ]
        model = checkpoint.summary.requantized(choice)
        assert {loaded.model for loaded in ways} == {split.summary} == {model}
        data = sum(layout.data_bytes for layout in split._manifest.layouts())
        assert {w.weight_bytes for w in ways} == {data} == {shard_bytes(model, shard)}
        for layer_idx in checkpoint.moe_layer_ids:
            request = make_request(layer_idx=layer_idx)
            first, *others = (
                ShardMoe(loaded, MoeKernel(num_threads=1))(request, "fp32")
                for loaded in ways
            )
            assert np.abs(first).max() > 0
            for other in others:
                np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(("choice", "tolerance"), [("int8", 0.02), ("int4", 0.2)])
def test_a_requantised_layer_computes_nearly_the_same(tmp_path, choice, tolerance):
    checkpoint = Checkpoint(make_mini_model().write(tmp_path))
    whole = PLAN.even(1, num_columns=160, num_experts=4).shards[0]
    exact, got = (
        ShardMoe(
            load_shard(checkpoint, whole, weight_format=how, show_progress=False),
            MoeKernel(num_threads=1),
        )(make_request(8), "fp32")
        for how in (None, choice)
    )
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert 0 < error < tolerance


def test_int4_takes_nine_sixteenths_of_e4m3():
    model = make_summary(
        hidden_size=7168, moe_intermediate_size=2048, weight_format="e4m3-block128"
    )
    shard = Shard(0, 2048, 0, 1)
    share = shard_bytes(model.requantized("int4"), shard) / shard_bytes(model, shard)
    assert share == pytest.approx(9 / 16, rel=1e-3)


def test_a_requantised_split_cannot_become_another_format(tmp_path):
    checkpoint = Checkpoint(make_mini_model().write(tmp_path / "model"))
    report = split_checkpoint(
        checkpoint, PLAN, tmp_path / "out", weight_format="int4", show_progress=False
    )
    split = SplitDirectory(report.directories[0])
    match = "--weight-format int8 must find the checkpoint's own weights, got int4"
    with pytest.raises(DuckConfigError, match=match):
        split.load(weight_format="int8", show_progress=False)


def test_a_split_in_another_format_is_another_split(tmp_path):
    checkpoint = Checkpoint(make_mini_model().write(tmp_path / "model"))
    split_checkpoint(checkpoint, PLAN, tmp_path / "out", show_progress=False)
    with pytest.raises(DuckConfigError, match="another plan or weight format"):
        split_checkpoint(
            checkpoint,
            PLAN,
            tmp_path / "out",
            weight_format="int4",
            show_progress=False,
        )


def test_requantised_is_the_same_model_but_for_the_format():
    model = make_summary()
    assert model.requantized(None) is model
    assert model.requantized("int4") == replace(model, weight_format="int4-group32")
