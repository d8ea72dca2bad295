"""Weights in e4m3: the documented order of additions, for any rows and instructions."""

import numpy as np
import pytest
import torch

from testing.filled import quantized
from testing.host_threads import using
from vllm_duck.errors import DuckCheckpointError
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.linear import Linear, MergedLinear, Mlp, apply_linear
from vllm_duck.models.cpu.packing import pack
from vllm_duck.models.matrix import E4M3, Matrix

ISAS = _host.supported_isas()
# (out, in): one block; several, the last ones in part; a partial group and tile.
SIZES = [(16, 128), (300, 384), (37, 200), (260, 72)]
ROWS = [1, 2, 3, 4, 5, 8, 9, 13, 64, 65, 150]


def dot_in_order(x, codes, scale):
    """In the order of csrc/simd/segment_dot.h, one product at a time.

    Codes count 2^-8 of their value and scales 2^8, which is exact.
    """
    num_columns, num_k = codes.shape
    weight = codes.float().numpy()
    total = np.zeros((x.shape[0], num_columns), np.float32)
    blocks = scale.repeat_interleave(128, 0)[:num_columns].numpy()
    for segment in range(0, num_k, 128):
        acc = np.zeros_like(total)
        for tile in range(segment, min(segment + 128, num_k), 32):
            even, odd = np.zeros_like(total), np.zeros_like(total)
            for k in range(tile, min(tile + 32, num_k)):
                chain = odd if k % 2 else even
                chain += np.multiply.outer(x[:, k], weight[:, k])
            acc += even + odd
        total += blocks[:, segment // 128] * acc
    return torch.from_numpy(total)


def make_linear(out_features, in_features):
    torch.manual_seed(out_features)
    linear = Linear(in_features, out_features)
    codes, scale = quantized(torch.randn(out_features, in_features))
    linear.weight.put("w", codes, scale)
    linear.finish_loading()
    return linear, codes, scale


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ISAS)
def test_a_linear_adds_in_the_documented_order(size, name):
    linear, codes, scale = make_linear(*size)
    x = torch.randn(max(ROWS), size[1]).bfloat16()
    expected = dot_in_order(x.float().numpy(), codes, scale)
    for num_threads in (1, 3):
        with using(num_threads, name, work_per_thread=1):
            for rows in ROWS:
                got = apply_linear(
                    linear.packed, x[:rows], size[1], size[0], dtype=torch.float32
                )
                assert torch.equal(got, expected[:rows]), rows


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("name", ISAS)
def test_every_code_counts_as_it_is(name, rows):
    """Zeros, subnormals and the largest, beside activations of any size."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127].repeat(2)[:256].repeat(16, 1).view(E4M3)
    scale = torch.tensor([[0.5, 2.0]])
    linear = Linear(256, 16)
    linear.weight.put("w", codes, scale)
    linear.finish_loading()
    for size in (1.0, 2.0**100, 2.0**-80):
        x = (torch.randn(rows, 256) * size).bfloat16()
        with using(1, name):
            got = apply_linear(linear.packed, x, 256, 16, dtype=torch.float32)
        assert torch.equal(got, dot_in_order(x.float().numpy(), codes, scale))


@pytest.mark.parametrize("name", ISAS)
def test_a_matrix_may_have_parts_of_both_kinds(name):
    """A part's columns are those of the part alone, wherever it lies."""
    torch.manual_seed(1)
    merged = MergedLinear(256, {"first": 200, "second": 36, "third": 130})
    plain = torch.randn(36, 256).bfloat16()
    parts = {
        "first": quantized(torch.randn(200, 256)),
        "second": (plain, None),
        "third": quantized(torch.randn(130, 256)),
    }
    alone = {}
    for part, tensors in parts.items():
        merged.parts[part].put(part, *tensors)
        linear = Linear(256, tensors[0].shape[0])
        linear.weight.put(part, *tensors)
        linear.finish_loading()
        alone[part] = linear
    packed = pack(_host.linear_new, k=256, weight=merged.matrices)
    x = torch.randn(70, 256).bfloat16()
    with using(2, name, work_per_thread=1):
        for rows in (1, 7, 70):
            got = apply_linear(packed, x[:rows], 256, 366)
            expected = torch.cat([linear(x[:rows]) for linear in alone.values()], 1)
            assert torch.equal(got, expected)


def test_a_weight_that_is_nan_is_refused_by_name():
    linear = Linear(256, 64)
    codes, scale = quantized(torch.randn(64, 256))
    codes.view(torch.uint8)[63, 255] = 0xFF
    linear.weight.put("layers.7.w", codes, scale)
    with pytest.raises(
        DuckCheckpointError, match="NaN, got one: .* in one of layers.7.w"
    ):
        linear.finish_loading()


def test_gate_and_up_are_of_one_kind():
    mlp = Mlp(256, 64)
    mlp.gate_proj.put("gate", *quantized(torch.randn(64, 256)))
    mlp.up_proj.copy_(torch.randn(64, 256))
    mlp.down_proj.copy_(torch.randn(256, 64))
    with pytest.raises(DuckCheckpointError, match="gate and up must both be e4m3"):
        mlp.finish_loading()


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(64, 200).to(E4M3), torch.ones(1, 1), r"\(1, 2\), .* got \(1, 1\)"),
        (torch.zeros(64, 200).to(E4M3), None, "w_scale_inv must have .* got None"),
        (torch.zeros(64, 100), None, r"w must have shape \(64, 200\)"),
        (torch.zeros(64, 200).int(), None, "w must be e4m3, bf16 or fp32"),
    ],
)
def test_what_is_no_such_matrix_is_refused(weight, scale, message):
    with pytest.raises(DuckCheckpointError, match=message):
        Matrix(64, 200).put("w", weight, scale)


def test_rows_of_codes_stay_in_their_scale_blocks():
    matrix = Matrix(256, 128)
    matrix.put("w", *quantized(torch.randn(256, 128)))
    before = matrix.values()
    order = torch.arange(256).unflatten(0, (2, 128)).flip(1).flatten()
    matrix.reorder(order)
    assert torch.equal(matrix.values(), before[order])
    with pytest.raises(DuckCheckpointError, match="within 128 rows"):
        matrix.reorder(torch.arange(256).flip(0))


def test_packed_codes_take_a_byte_each():
    """Of huge pages, what the kernel reads is there once."""
    from testing.memory.usage import most_new_bytes

    codes, scale = quantized(torch.randn(4096, 4096))
    linear = Linear(4096, 4096)
    linear.weight.put("w", codes, scale)
    _, held = most_new_bytes(linear.finish_loading)
    assert codes.nbytes <= held < 1.1 * codes.nbytes + (2 << 20)
