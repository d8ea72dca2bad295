"""A duck reads what it owns and nothing else; damage is found before reading."""

import numpy as np
import pytest

from testing.ducks.mini_model import (
    LAYER_IDS,
    NUM_COLUMNS,
    NUM_EXPERTS,
    WHOLE,
    expert_name,
    make_mini_model,
    make_request,
    reference_moe,
)
from vllm_duck.errors import DuckCheckpointError, DuckConfigError, DuckShapeError
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard, shard_bytes
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.wire.bf16 import bf16_to_f32

NAME = expert_name(3, 2, "down")


def _moe(checkpoint, shard):
    loaded = load_shard(checkpoint, shard, show_progress=False)
    return ShardMoe(loaded, MoeKernel(num_threads=1))


def _plan(num_ducks):
    return ShardPlan.even(num_ducks, num_columns=NUM_COLUMNS, num_experts=NUM_EXPERTS)


@pytest.mark.parametrize("layer_idx", LAYER_IDS)
def test_a_whole_model_computes_the_reference(bf16_model, bf16_checkpoint, layer_idx):
    request = make_request(layer_idx=layer_idx)
    got = _moe(bf16_checkpoint, WHOLE)(request, "fp32")
    expected = reference_moe(bf16_model, request)
    # One rounding to bf16 (2^-9) per inner value, averaged over the sum.
    np.testing.assert_allclose(got, expected, atol=2**-8 * np.abs(expected).max())


@pytest.mark.parametrize("num_ducks", [1, 2, 3, 5, 24, 32])
def test_shards_of_any_count_add_up_to_the_whole(tmp_path, any_model, num_ducks):
    checkpoint = Checkpoint(any_model.write(tmp_path))
    request = make_request()
    expected = _moe(checkpoint, WHOLE)(request, "fp32")
    partials = [_moe(checkpoint, s)(request, "fp32") for s in _plan(num_ducks).shards]
    # Same products, another order of fp32 additions over 160 columns.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(sum(partials), expected, atol=scale * 2**-18)


def test_uneven_shards_off_the_block_grid_add_up_to_the_whole(tmp_path, any_model):
    checkpoint = Checkpoint(any_model.write(tmp_path))
    request = make_request()
    plan = ShardPlan(
        NUM_COLUMNS,
        NUM_EXPERTS,
        (Shard(0, 112, 0, 4), Shard(112, 160, 0, 1), Shard(112, 160, 1, 4)),
    )
    expected = _moe(checkpoint, WHOLE)(request, "fp32")
    partials = [_moe(checkpoint, s)(request, "fp32") for s in plan.shards]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(sum(partials), expected, atol=scale * 2**-18)


@pytest.mark.parametrize("num_files", [None, 3])
def test_what_a_shard_does_not_own_is_never_used(tmp_path, num_files):
    shard = Shard(16, 96, 1, 3)
    request = make_request()
    healthy = make_mini_model()
    healthy.num_files = num_files
    expected = _moe(Checkpoint(healthy.write(tmp_path / "a")), shard)(request, "fp32")
    poisoned = make_mini_model()
    poisoned.num_files = num_files
    for name, (dtype, array) in poisoned.tensors.items():
        if ".experts." not in name:
            continue
        damaged = np.full_like(array, 0x7FC1)
        if int(name.split(".")[5]) in (1, 2):
            owned = np.s_[:, 16:96] if "down_proj" in name else np.s_[16:96, :]
            damaged[owned] = array[owned]
        poisoned.tensors[name] = (dtype, damaged)
    got = _moe(Checkpoint(poisoned.write(tmp_path / "b")), shard)(request, "fp32")
    np.testing.assert_array_equal(got, expected)
    assert np.isfinite(got).all()


def test_the_bytes_read_are_the_bytes_owned(tmp_path, any_model):
    checkpoint = Checkpoint(any_model.write(tmp_path))
    for shard in (*_plan(3).shards, Shard(112, 144, 1, 3), WHOLE):
        loaded = load_shard(checkpoint, shard, show_progress=False)
        assert loaded.num_bytes_read == loaded.weight_bytes
        assert loaded.num_bytes_read == shard_bytes(checkpoint.summary, shard)


def test_a_reply_in_bf16_is_the_rounded_sum(bf16_checkpoint):
    moe = _moe(bf16_checkpoint, WHOLE)
    exact = moe(make_request(), "fp32")
    rounded = bf16_to_f32(moe(make_request(), "bf16"))
    np.testing.assert_allclose(rounded, exact, rtol=2**-8)


def test_info_says_what_was_loaded(bf16_checkpoint):
    moe = _moe(bf16_checkpoint, Shard(0, 32, 0, 4))
    assert moe.info.model == bf16_checkpoint.summary
    assert moe.info.weight_bytes == moe.num_bytes_read
    assert (moe.info.shard, moe.info.num_threads) == (Shard(0, 32, 0, 4), 1)


def test_another_layer_is_refused(bf16_checkpoint):
    moe = _moe(bf16_checkpoint, WHOLE)
    match = r"layer_idx must be one of \[1, 2, 3\], got 0"
    with pytest.raises(DuckShapeError, match=match):
        moe(make_request(layer_idx=0), "fp32")


def test_a_missing_expert_is_named(tmp_path, bf16_model):
    del bf16_model.tensors[NAME]
    with pytest.raises(DuckCheckpointError, match=f"does not list the tensor {NAME};"):
        load_shard(Checkpoint(bf16_model.write(tmp_path)), WHOLE)


@pytest.mark.parametrize("num_files", [None, 2])
def test_a_missing_scale_is_named(tmp_path, num_files):
    model = make_mini_model("e4m3-block128")
    model.num_files = num_files
    del model.tensors[f"{NAME}_scale_inv"]
    match = f"does not list the tensor {NAME}_scale_inv"
    with pytest.raises(DuckCheckpointError, match=match):
        load_shard(Checkpoint(model.write(tmp_path)), WHOLE)


def test_a_scale_that_only_the_index_lacks_is_named(tmp_path):
    model = make_mini_model("e4m3-block128")
    model.num_files = 2
    model.unlisted.add(f"{NAME}_scale_inv")
    match = f"does not list the tensor {NAME}_scale_inv"
    with pytest.raises(DuckCheckpointError, match=match):
        load_shard(Checkpoint(model.write(tmp_path)), WHOLE)


def test_a_wrong_shape_is_named_with_both(tmp_path, bf16_model):
    bf16_model.tensors[NAME] = ("BF16", np.zeros((32, 159), np.uint16))
    match = rf"{NAME} must have shape \[32, 160\] by config.json, got \[32, 159\]"
    with pytest.raises(DuckCheckpointError, match=match):
        load_shard(Checkpoint(bf16_model.write(tmp_path)), WHOLE)


def test_a_scale_of_other_blocks_is_named(tmp_path):
    model = make_mini_model("e4m3-block128")
    model.tensors[f"{NAME}_scale_inv"] = ("F32", np.zeros((1, 3), np.float32))
    match = rf"{NAME}_scale_inv must have shape \[1, 2\] by config.json, got \[1, 3\]"
    with pytest.raises(DuckCheckpointError, match=match):
        load_shard(Checkpoint(model.write(tmp_path)), WHOLE)


def test_a_wrong_dtype_is_named_with_both(tmp_path, bf16_model):
    bf16_model.tensors[NAME] = ("F16", bf16_model.tensors[NAME][1])
    with pytest.raises(DuckCheckpointError, match=f"{NAME} must be BF16 .*, got F16"):
        load_shard(Checkpoint(bf16_model.write(tmp_path)), WHOLE)


def test_a_truncated_file_is_named(tmp_path, bf16_model):
    bf16_model.num_files = 2
    checkpoint = Checkpoint(bf16_model.write(tmp_path))
    path = checkpoint.file_of(NAME)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DuckCheckpointError, match=f"{path} is truncated: the tensor"):
        load_shard(checkpoint, WHOLE)


def test_a_file_that_shrinks_after_the_check_is_named(tmp_path, bf16_model):
    checkpoint = Checkpoint(bf16_model.write(tmp_path))
    last = max(
        (checkpoint.place_of(name) for name in checkpoint.tensor_names),
        key=lambda place: place.end,
    )
    last.path.write_bytes(last.path.read_bytes()[: last.begin + 10])
    with pytest.raises(
        DuckCheckpointError, match="ended within the tensor .* replaced"
    ):
        load_shard(checkpoint, WHOLE)


def test_a_weight_that_is_not_finite_is_named(tmp_path, bf16_model):
    bf16_model.tensors[NAME][1][5, 7] = 0x7FC0
    match = "model.layers.3.mlp.experts.2.gate_proj.weight: .* down_proj.weight .* NaN"
    with pytest.raises(DuckCheckpointError, match=match):
        load_shard(Checkpoint(bf16_model.write(tmp_path)), WHOLE)


@pytest.mark.parametrize(
    "shard", [Shard(0, 176, 0, 4), Shard(0, 160, 0, 5), Shard(32, 32, 0, 4)]
)
def test_a_shard_beyond_the_model_is_refused(bf16_checkpoint, shard):
    with pytest.raises(DuckConfigError, match="a shard must lie in columns"):
        load_shard(bf16_checkpoint, shard)


def test_a_shard_of_odd_width_is_refused(bf16_checkpoint):
    with pytest.raises(DuckShapeError, match="num_columns must be a positive multiple"):
        load_shard(bf16_checkpoint, Shard(0, 24, 0, 4))
