"""Formats by integer arithmetic: torch's and the C++ host's bits, of every code."""

import numpy as np
import pytest
import torch
import triton.language as tl

from testing.gpu.interpreter import interpreted
from testing.gpu.numbers import bits, lifted, numbers, poisoned, seeded
from vllm_duck.models.cuda.kernels import formats


@interpreted
def _read(codes, values, half, wide, lifts, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(values + i, formats.e4m3_value(tl.load(codes + i)))
    tl.store(wide + i, formats.load_bf16(half + i))
    tl.store(lifts + i, formats.lifted_bits(tl.load(half + i)))


@interpreted
def _write(x, codes, half, rounded, keys, exps, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    clamped = tl.where(v > 448.0, 448.0, tl.where(v < -448.0, -448.0, v))
    tl.store(codes + i, formats.e4m3_code(clamped))
    tl.store(half + i, formats.bf16_bits(v))
    tl.store(rounded + i, formats.round_bf16(v))
    tl.store(keys + i, formats.ordered(v))
    tl.store(exps + i, formats.exp_clamped(v))


@interpreted
def _pairs(pairs, low, high, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = formats.pair_operands(tl.load(pairs + i))
    tl.store(low + i, a)
    tl.store(high + i, b)


def all_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    return torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)


def test_codes_are_read_exactly():
    codes, half = all_codes(), bits(torch.randn(256, generator=seeded()))
    values, wide = (poisoned(256, dtype=torch.float32) for _ in range(2))
    lifts = poisoned(256)
    _read[(1,)](codes, values, half, wide, lifts, 256)
    assert torch.equal(values, codes.view(torch.float8_e4m3fn).float())
    assert torch.equal(wide.double(), numbers(half))
    assert torch.equal(lifts, lifted(numbers(half)))


@pytest.fixture(scope="module")
def written():
    """Numbers of all magnitudes and ties, and what became of them."""
    torch.manual_seed(0)
    codes = all_codes().view(torch.float8_e4m3fn).float()
    ties = (codes[:120] + codes[1:121]) / 2
    wild = torch.randn(2048) * 10 ** torch.randint(-9, 5, (2048,)).float()
    special = torch.tensor([0.0, -0.0, float("nan"), -90.0, 90.0, -1e-45])
    x = torch.cat([codes, ties, -ties, wild, special])
    x = torch.cat([x, torch.rand(4096 - len(x)) * 2**-6])
    out = {
        "codes": poisoned(4096, dtype=torch.uint8),
        "half": poisoned(4096),
        "rounded": poisoned(4096, dtype=torch.float32),
        "keys": poisoned(4096, dtype=torch.uint32),
        "exps": poisoned(4096, dtype=torch.float32),
    }
    _write[(1,)](x, *out.values(), 4096)
    return {"x": x, **out}


def test_e4m3_rounds_as_torch(written):
    want = written["x"].clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(written["codes"], want)


def test_bf16_rounds_as_torch(written):
    want = written["x"].to(torch.bfloat16)
    got, is_nan = written["half"].to(torch.int32), want.isnan()
    assert torch.equal(got[~is_nan], bits(want).to(torch.int32)[~is_nan])
    assert (got[is_nan] == 0x7FC0).all()
    assert torch.equal(written["rounded"].nan_to_num(), want.float().nan_to_num())


def test_numbers_order_as_their_keys(written):
    is_number = ~written["x"].isnan()
    x, keys = written["x"][is_number], written["keys"][is_number].long()
    order = keys.argsort()
    assert (x[order].diff() >= 0).all()
    assert len(keys.unique()) == len((x + 0.0).unique())


def test_exp_is_within_two_ulps(written):
    x = written["x"].clamp(-87, 88)
    want = x.double().exp()
    error = ((written["exps"].double() - want) / want).nan_to_num()
    assert error.abs().max() < 2 * 2**-23


def test_pairs_stand_for_two_codes():
    codes = all_codes().to(torch.int32)
    pairs = (codes | codes.flip(0) << 8).to(torch.uint16)
    low, high = (poisoned(256, dtype=torch.float32) for _ in range(2))
    _pairs[(1,)](pairs, low, high, 256)
    want = all_codes().view(torch.float8_e4m3fn).double() * 2.0**-120
    np.testing.assert_array_equal(low.double(), want)
    np.testing.assert_array_equal(high.double(), want.flip(0))
