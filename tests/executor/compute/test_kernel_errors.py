"""What the kernel cannot use is refused with one of our errors, never computed."""

import numpy as np
import pytest

from testing.ducks.moe_reference import (
    make_expert,
    make_rows,
    make_shard,
    reference_f64,
)
from vllm_duck.config import ISA_VARIABLE
from vllm_duck.errors import DuckCheckpointError, DuckConfigError, DuckShapeError
from vllm_duck.executor.compute import kernel as kernel_module
from vllm_duck.executor.compute.kernel import ISAS, LayerWeights, MoeKernel

WEIGHTS = ("gate", "up", "down")
SCALES = ("gate_scale", "up_scale", "down_scale")


@pytest.fixture(scope="module")
def kernel() -> MoeKernel:
    return MoeKernel(num_threads=1)


@pytest.fixture(scope="module")
def shard():
    return make_shard(np.random.default_rng(0), expert_lo=2, n_routed_experts=10)


def make_call(shard, **changes):
    hidden, ids, weights = make_rows(np.random.default_rng(1), shard, rows=3)
    call = {
        "hidden": hidden,
        "topk_ids": ids,
        "topk_weights": weights,
        "expert_lo": shard.expert_lo,
        "n_routed_experts": shard.n_routed_experts,
        "out": np.zeros(hidden.shape, np.float32),
    }
    return call | changes


def make_layer(**changes) -> LayerWeights:
    sizes = {
        "num_experts": 1,
        "hidden_size": 64,
        "num_columns": 32,
        "column_offset": 0,
        "weight_format": "e4m3-block128",
    }
    return LayerWeights(**(sizes | changes))


# --- ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad_id", [-1, -(2**31), 10, 2**31 - 1])
@pytest.mark.parametrize("place", [(0, 0), (2, 3)])
def test_an_id_outside_the_model_is_an_error(kernel, shard, bad_id, place):
    call = make_call(shard)
    call["topk_ids"][place] = bad_id
    with pytest.raises(DuckShapeError, match=rf"got {bad_id} in row {place[0]}"):
        kernel.forward(shard.weights, **call)


def test_no_experts_per_row_is_an_error(kernel, shard):
    empty = np.zeros((3, 0))
    call = make_call(
        shard, topk_ids=empty.astype(np.int32), topk_weights=empty.astype(np.float32)
    )
    with pytest.raises(DuckShapeError, match="must have 1 to 2\\^24 entries"):
        kernel.forward(shard.weights, **call)


@pytest.mark.parametrize("range_", [(-1, 10), (7, 10), (2, 3)])
def test_a_shard_beyond_the_model_is_an_error(kernel, shard, range_):
    call = make_call(shard, expert_lo=range_[0], n_routed_experts=range_[1])
    with pytest.raises(DuckShapeError, match="must lie in"):
        kernel.forward(shard.weights, **call)


# --- arrays -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("hidden", np.zeros((3, 240), np.uint16), "hidden must have size 256"),
        ("hidden", np.zeros((3, 256), np.float32), "hidden must have a type code"),
        ("hidden", np.zeros(256, np.uint16), "hidden must have 2 axes"),
        ("hidden", np.zeros((3, 512), np.uint16)[:, ::2], "hidden must have 2 axes"),
        ("hidden", np.zeros((6, 256), np.uint16)[::2], "hidden must be C-contiguous"),
        ("hidden", "text", "hidden must be an array"),
        ("topk_ids", np.zeros((2, 4), np.int32), "topk_ids must have size 3"),
        ("topk_ids", np.zeros((3, 4), np.int64), "topk_ids must have a type code"),
        ("topk_ids", np.zeros((3, 4), ">i4"), "topk_ids must have a type code"),
        ("topk_ids", np.zeros((3, 8), np.int32)[:, :4], "topk_ids must be C-contig"),
        ("topk_weights", np.zeros((3, 5), np.float32), "topk_weights must have size 4"),
        ("topk_weights", np.zeros((3, 4)), "topk_weights must have a type code"),
        ("out", np.zeros((4, 256), np.float32), "out must have size 3"),
        ("out", np.zeros((3, 256)), "out must have a type code"),
        ("out", b"read only", "out must be a writable"),
    ],
)
def test_a_wrong_array_is_an_error(kernel, shard, name, value, match):
    with pytest.raises(DuckShapeError, match=match):
        kernel.forward(shard.weights, **make_call(shard, **{name: value}))


def test_a_read_only_output_is_an_error(kernel, shard):
    out = np.zeros((3, 256), np.float32)
    out.flags.writeable = False
    with pytest.raises(DuckShapeError, match="out must be a writable"):
        kernel.forward(shard.weights, **make_call(shard, out=out))


# --- layers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": 100}, "hidden_size must be a positive multiple of 16"),
        ({"hidden_size": 0}, "hidden_size must be a positive"),
        ({"num_columns": 8}, "num_columns must be a positive multiple of 16"),
        ({"num_columns": -16}, "num_columns must be a positive"),
        ({"column_offset": 8}, "column_offset must be a multiple of 16"),
        ({"column_offset": 128}, "column_offset must be a multiple of 16"),
        ({"num_experts": 0}, "num_experts must be in"),
        ({"weight_format": "int4"}, "weight_format must be one of"),
    ],
)
def test_a_layer_of_impossible_size_is_an_error(changes, match):
    with pytest.raises(DuckShapeError, match=match):
        make_layer(**changes)


@pytest.mark.parametrize("expert_idx", [-1, 1])
def test_an_expert_out_of_range_is_an_error(expert_idx):
    expert = make_expert(np.random.default_rng(2), hidden=64, columns=32, offset=0)
    with pytest.raises(DuckShapeError, match="expert_idx must be in"):
        make_layer().load_expert(expert_idx, **vars(expert))


@pytest.mark.parametrize("name", WEIGHTS + SCALES)
def test_an_expert_with_a_wrong_shape_is_an_error(name):
    expert = make_expert(np.random.default_rng(3), hidden=64, columns=32, offset=0)
    arrays = vars(expert)
    arrays[name] = np.concatenate([arrays[name]] * 2)
    with pytest.raises(DuckShapeError, match=f"{name} must have size"):
        make_layer().load_expert(0, **arrays)


def test_missing_scales_are_an_error():
    expert = make_expert(np.random.default_rng(4), hidden=64, columns=32, offset=0)
    arrays = vars(expert) | {"up_scale": None}
    with pytest.raises(DuckShapeError, match="up_scale must be an array"):
        make_layer().load_expert(0, **arrays)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (-1, -1), (17, 31)])
def test_a_nan_weight_is_an_error_that_names_the_tensor(name, code, place):
    layer = make_layer()
    expert = make_expert(np.random.default_rng(5), hidden=64, columns=32, offset=0)
    getattr(expert, name)[place] = code
    with pytest.raises(DuckCheckpointError, match=rf"{name}_proj\.weight must be fin"):
        layer.load_expert(0, **vars(expert))
    with pytest.raises(DuckCheckpointError, match="expert 0 of the shard was never"):
        layer.check()


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80, 0xFFFF])
def test_a_bf16_weight_that_is_not_finite_is_an_error(name, bits):
    layer = make_layer(weight_format="bf16")
    expert = make_expert(
        np.random.default_rng(6), hidden=64, columns=32, offset=0, weight_format="bf16"
    )
    getattr(expert, name)[3, 7] = bits
    with pytest.raises(DuckCheckpointError, match=rf"{name}_proj\.weight must be fin"):
        layer.load_expert(0, **vars(expert))


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**120])
def test_a_scale_that_is_not_usable_is_an_error_that_names_it(name, value):
    layer = make_layer()
    expert = make_expert(np.random.default_rng(7), hidden=64, columns=32, offset=0)
    getattr(expert, name)[0, 0] = value
    tensor = name.replace("_scale", r"_proj\.weight_scale_inv")
    with pytest.raises(DuckCheckpointError, match=tensor):
        layer.load_expert(0, **vars(expert))


def test_check_names_the_first_expert_that_was_never_loaded():
    layer = make_layer(num_experts=3)
    expert = make_expert(np.random.default_rng(8), hidden=64, columns=32, offset=0)
    layer.load_expert(0, **vars(expert))
    layer.load_expert(2, **vars(expert))
    with pytest.raises(DuckCheckpointError, match="expert 1 of the shard was never"):
        layer.check()


# --- the kernel's settings ----------------------------------------------------------


def test_an_unknown_isa_is_an_error():
    with pytest.raises(DuckConfigError, match="isa must be one of"):
        MoeKernel(num_threads=1, isa="mmx")


def test_an_isa_that_this_cpu_lacks_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel_module, "ISAS", (*ISAS, "sme"))
    with pytest.raises(DuckConfigError, match="this CPU cannot run isa 'sme'"):
        MoeKernel(num_threads=1, isa="sme")


def test_the_environment_chooses_the_isa(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert MoeKernel(num_threads=1).isa == "portable"
    monkeypatch.setenv(ISA_VARIABLE, "nonsense")
    with pytest.raises(DuckConfigError, match=ISA_VARIABLE):
        MoeKernel(num_threads=1)
    monkeypatch.setenv(ISA_VARIABLE, "")
    assert MoeKernel(num_threads=1).isa in ISAS


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_an_impossible_thread_count_is_an_error(num_threads):
    with pytest.raises(DuckConfigError, match="num_threads must be in"):
        MoeKernel(num_threads=num_threads)


# --- fuzz ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_and_ids_give_the_right_answer_or_an_error(kernel, seed):
    rng = np.random.default_rng(seed)
    sizes = {
        "experts": int(rng.integers(1, 5)),
        "hidden": int(rng.integers(1, 24)) * int(rng.choice([16, 16, 16, 1])),
        "columns": int(rng.integers(1, 12)) * int(rng.choice([16, 16, 16, 1])),
        "offset": int(rng.integers(0, 8)) * 16,
    }
    is_possible = sizes["hidden"] % 16 == 0 and sizes["columns"] % 16 == 0
    if not is_possible:
        with pytest.raises(DuckShapeError):
            make_shard(rng, **sizes)
        return
    total = sizes["experts"] + 3
    shard = make_shard(rng, **sizes, expert_lo=1, n_routed_experts=total)
    hidden, ids, weights = make_rows(rng, shard, rows=int(rng.integers(1, 12)))
    ids[...] = rng.integers(-1, total + 1, ids.shape) if seed % 2 else ids
    if ids.min() < 0 or ids.max() >= total:
        with pytest.raises(DuckShapeError, match="topk_ids must be in"):
            shard.forward(kernel, hidden, ids, weights)
        return
    expected, bound = reference_f64(shard, hidden, ids, weights)
    out = shard.forward(kernel, hidden, ids, weights)
    assert (np.abs(out - expected) <= bound).all()
