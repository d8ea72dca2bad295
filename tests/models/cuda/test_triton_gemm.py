"""Rows times matrices: float64's numbers, and each row's own bits."""

import pytest
import torch
from torch.nn.functional import silu

from testing.gpu.matrices import coded, plain, product
from testing.gpu.numbers import (
    COMPANIES,
    assert_close,
    bits,
    lifted,
    lowered,
    numbers,
    poisoned,
    seeded,
)
from vllm_duck.errors import DuckCheckpointError, DuckShapeError
from vllm_duck.models.cuda.kernels.gemm import Out, gemm, gemm_heads, gemm_splits
from vllm_duck.models.cuda.kernels.packing import pack, pack_heads
from vllm_duck.models.cuda.kernels.tiles import Tile

# Wide: the interpreter pays for each program.
WIDE = Tile(block=256, num_warps=4)
# fp32 sums of up to 512 products, against float64.
SUM = 2e-6
# Rounded to bf16.
ROUNDED = 2**-9

kinds = pytest.mark.parametrize("make", [coded, plain])


def make_x(num_rows, k, *, seed=1):
    x = torch.randn(num_rows, k, generator=seeded(seed)).to(torch.bfloat16)
    return x.double()


@kinds
@pytest.mark.parametrize(
    ("num_rows", "n", "k"), [(1, 96, 256), (2, 200, 512), (17, 40, 72), (33, 16, 384)]
)
def test_sums_are_float64_s(make, num_rows, n, k):
    x, matrix = make_x(num_rows, k), make(n, k)
    out = poisoned(num_rows, n, dtype=torch.float32)
    gemm(lifted(x), pack([matrix]), out, Out.WIDE, tile=WIDE)
    assert_close(out.double(), product(x, matrix), SUM)


@kinds
def test_plain_rows_give_the_bits_of_lifted_ones(make):
    x, weight = make_x(3, 256), pack([make(64, 256)])
    lift, plainly = (poisoned(3, 64, dtype=torch.float32) for _ in range(2))
    gemm(lifted(x), weight, lift, Out.WIDE, tile=WIDE)
    gemm(bits(x), weight, plainly, Out.WIDE, x_is_lifted=False, tile=WIDE)
    assert torch.equal(lift, plainly)


@kinds
def test_parts_of_a_matrix_have_their_own_scales(make):
    # As q_a, kv_a and the indexer's key lie below each other: 64 rows into a block.
    parts = [make(rows, 256, seed=rows) for rows in (128, 192, 40)]
    x, out = make_x(2, 256), poisoned(2, 360, dtype=torch.float32)
    weight = pack(parts)
    assert weight.scales is None or weight.group == 64
    gemm(lifted(x), weight, out, Out.WIDE, tile=WIDE)
    assert_close(out.double(), product(x, *parts), SUM)


@kinds
def test_the_smallest_codes_count(make):
    x, matrix = make_x(1, 128), make(16, 128)
    if matrix.scale is None:
        matrix.weight.fill_(2**-9)
    else:
        matrix.weight.view(torch.uint8).fill_(1)
        matrix.scale.fill_(1.0)
    out = poisoned(1, 16, dtype=torch.float32)
    gemm(lifted(x), pack([matrix]), out, Out.WIDE, tile=WIDE)
    assert_close(out.double(), product(x, matrix), SUM)


@kinds
def test_the_residual_is_added_before_the_rounding(make):
    x, matrix = make_x(3, 256), make(72, 256)
    residual = bits(torch.randn(3, 72, generator=seeded()))
    wide = poisoned(3, 72, dtype=torch.float32)
    gemm(lifted(x), pack([matrix]), wide, Out.WIDE, tile=WIDE)
    want = bits(numbers(residual).float() + wide)
    gemm(
        lifted(x),
        pack([matrix]),
        residual,
        Out.RESIDUAL,
        residual=residual,
        tile=WIDE,
    )
    assert torch.equal(residual, want)


@kinds
@pytest.mark.parametrize("kind", [Out.BF16, Out.LIFTED])
def test_sums_are_rounded_once(make, kind):
    x, weight = make_x(2, 128), pack([make(48, 128)])
    wide, out = poisoned(2, 48, dtype=torch.float32), poisoned(2, 48)
    gemm(lifted(x), weight, wide, Out.WIDE, tile=WIDE)
    gemm(lifted(x), weight, out, kind, tile=WIDE)
    got = lowered(out) if kind is Out.LIFTED else numbers(out)
    assert torch.equal(got, numbers(bits(wide)))


@kinds
@pytest.mark.parametrize("columns", [128, 72])
def test_gated_is_silu_of_the_gate_times_up(make, columns):
    x = make_x(3, 256)
    gate, up = make(columns, 256, seed=1), make(columns, 256, seed=2)
    out = poisoned(3, columns)
    gemm(lifted(x), pack([gate, up]), out, Out.GATED, tile=WIDE)
    assert_close(lowered(out), silu(product(x, gate)) * product(x, up), ROUNDED)


@kinds
def test_parts_of_a_sum_add_up(make):
    x, matrix = make_x(3, 1152), make(48, 1152)
    out = poisoned(4, 3, 48, dtype=torch.float32)
    gemm_splits(lifted(x), pack([matrix]), out, tile=WIDE)
    assert_close(out.double().sum(0), product(x, matrix), SUM)
    # Nine tiles of K in four parts of three: the last has none.
    assert (out[3] == 0).all()


@kinds
def test_heads_have_their_own_matrices(make):
    heads, nope, value, latent = 3, 128, 256, 384
    kv_b = make(heads * (nope + value), latent)
    both = kv_b.values().double().view(heads, -1, latent)
    key_up, value_up = pack_heads(kv_b, heads, nope)
    query = make_x(2, heads * nope).view(2, heads, nope)
    # A part of wider heads: the rope part stays as it is.
    out = poisoned(2, heads, latent + 64)
    gemm_heads(lifted(query), key_up, out[..., :latent], Out.BF16, tile=WIDE)
    want = torch.einsum("thn,hnl->thl", query, both[:, :nope])
    assert_close(numbers(out[..., :latent].contiguous()), want, ROUNDED)
    assert (out[..., latent:].contiguous().view(torch.int16) == -1).all()
    rows, values = make_x(2, heads * latent).view(2, heads, latent), poisoned(2, 768)
    out = values.view(2, heads, value)
    gemm_heads(lifted(rows), value_up, out, Out.LIFTED, tile=WIDE)
    want = torch.einsum("thl,hvl->thv", rows, both[:, nope:])
    assert_close(lowered(out), want, ROUNDED)


def test_heads_in_bf16_may_have_any_size():
    kv_b = plain(2 * (40 + 24), 72)
    both = kv_b.values().double().view(2, -1, 72)
    key_up, value_up = pack_heads(kv_b, 2, 40)
    query, out = make_x(3, 80).view(3, 2, 40), poisoned(3, 2, 72)
    gemm_heads(lifted(query), key_up, out, Out.BF16, tile=WIDE)
    assert_close(
        numbers(out), torch.einsum("thn,hnl->thl", query, both[:, :40]), ROUNDED
    )
    rows, out = make_x(3, 144).view(3, 2, 72), poisoned(3, 2, 24)
    gemm_heads(lifted(rows), value_up, out, Out.BF16, tile=WIDE)
    assert_close(
        numbers(out), torch.einsum("thl,hvl->thv", rows, both[:, 40:]), ROUNDED
    )


@kinds
@pytest.mark.parametrize("company", COMPANIES)
def test_a_row_s_bits_are_its_own(make, company):
    x, weight = lifted(make_x(company, 512)), pack([make(96, 512)])
    out, alone = (poisoned(rows, 96, dtype=torch.float32) for rows in (company, 1))
    gemm(x, weight, out, Out.WIDE, tile=WIDE)
    gemm(x[-1:], weight, alone, Out.WIDE, tile=WIDE)
    assert torch.equal(alone, out[-1:])


@kinds
def test_a_tile_s_width_changes_no_bit(make):
    x, weight = lifted(make_x(2, 256)), pack([make(96, 256)])
    narrow, wide = (poisoned(2, 96, dtype=torch.float32) for _ in range(2))
    gemm(x, weight, narrow, Out.WIDE, tile=Tile(block=32, num_warps=4))
    gemm(x, weight, wide, Out.WIDE, tile=WIDE)
    assert torch.equal(narrow, wide)


def test_neighbours_are_both_e4m3_or_neither():
    with pytest.raises(DuckCheckpointError, match="must be e4m3 as coded"):
        pack([coded(32, 128), plain(32, 128)])


def test_heads_of_e4m3_begin_with_their_scales():
    with pytest.raises(DuckCheckpointError, match="multiples of 128 rows, got 64"):
        pack_heads(coded(2 * (64 + 64), 128), 2, 64)


def test_other_shapes_are_refused():
    x, weight = lifted(make_x(2, 128)), pack([coded(32, 128)])
    out = poisoned(2, 32)
    heads = pack_heads(coded(512, 128), 2, 128)[0]
    bad = {
        r"x must be \[2, 128\] torch.uint16": (x[:, :64], weight, out, Out.BF16),
        r"out must be \[2, 32\] torch.float32": (x, weight, out, Out.WIDE),
        r"out must be \[2, 16\]": (x, weight, out, Out.GATED),
        "residual must be given for RESIDUAL alone": (x, weight, out, Out.RESIDUAL),
        "one matrix, got 2 heads": (x, heads, out, Out.BF16),
        "x must have a row, got none": (x[:0], weight, out[:0], Out.BF16),
    }
    for match, arguments in bad.items():
        with pytest.raises(DuckShapeError, match=match):
            gemm(*arguments)
    apart = poisoned(2, 64)[:, :32]
    with pytest.raises(DuckShapeError, match="rows as far apart as out, 32, got 64"):
        gemm(x, weight, out, Out.RESIDUAL, residual=apart)
    with pytest.raises(DuckShapeError, match="heads must be BF16 or LIFTED"):
        gemm_heads(x.view(2, 1, 128), weight, out.view(2, 1, 32), Out.WIDE)
