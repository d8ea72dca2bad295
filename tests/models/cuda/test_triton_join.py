"""The end of a layer and the norm: float64's numbers, and each row's own bits."""

import pytest
import torch

from testing.gpu.numbers import (
    COMPANIES,
    assert_close,
    bits,
    lowered,
    numbers,
    poisoned,
    seeded,
)
from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cuda.kernels.join import join_norm, norm

EPS = 1e-6


def make_rows(num_rows, size):
    g = seeded(size)
    rows = bits(torch.randn(num_rows, size, generator=g))
    shared, routed = (torch.randn(num_rows, size, generator=g) for _ in range(2))
    return rows, shared, routed, torch.rand(size, generator=g) + 0.5


def rms_norm(x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight.double(), EPS)


@pytest.mark.parametrize("is_lifted", [True, False])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 7168), (3, 200), (5, 16)])
def test_norm_is_float64_s_to_a_rounding(num_rows, size, is_lifted):
    rows, _, _, weight = make_rows(num_rows, size)
    out = poisoned(num_rows, size)
    norm(rows, weight, out, eps=EPS, is_lifted=is_lifted)
    got = lowered(out) if is_lifted else numbers(out)
    assert_close(got, rms_norm(numbers(rows), weight), 2**-9)


@pytest.mark.parametrize(("num_rows", "size"), [(2, 7168), (3, 200)])
def test_the_joined_row_is_rounded_once(num_rows, size):
    rows, shared, routed, weight = make_rows(num_rows, size)
    joined, normed = poisoned(num_rows, size), poisoned(num_rows, size)
    join_norm(rows, shared, routed, weight, joined, normed, eps=EPS)
    # As the C++ host adds them.
    assert torch.equal(joined, bits(numbers(rows).float() + (shared + routed)))
    assert_close(lowered(normed), rms_norm(numbers(joined), weight), 2**-9)


@pytest.mark.parametrize("company", COMPANIES)
def test_a_row_s_bits_are_its_own(company):
    rows, shared, routed, weight = make_rows(company, 200)
    joined, normed = poisoned(company, 200), poisoned(company, 200)
    join_norm(rows, shared, routed, weight, joined, normed, eps=EPS)
    alone, alone_normed = poisoned(1, 200), poisoned(1, 200)
    last = rows[-1:], shared[-1:], routed[-1:]
    join_norm(*(x.clone() for x in last), weight, alone, alone_normed, eps=EPS)
    assert torch.equal(alone, joined[-1:])
    assert torch.equal(alone_normed, normed[-1:])


def test_other_shapes_dtypes_and_layouts_are_refused():
    rows, shared, routed, weight = make_rows(2, 64)
    out = poisoned(2, 64)
    bad = {
        r"weight must be \[64\] torch.float32": (rows, shared, routed, weight[:32]),
        r"shared must be \[2, 64\]": (rows, shared[:1], routed, weight),
        r"routed must be .*got \[2, 64\] torch.float64": (
            (rows, shared, routed.double(), weight)
        ),
        r"rows must be \[any, any\] torch.uint16": (
            (rows.view(torch.int16), shared, routed, weight)
        ),
        r"rows must be .*strides \(1, 2\)": (
            (rows.T.contiguous().T, shared, routed, weight)
        ),
    }
    for match, arguments in bad.items():
        with pytest.raises(DuckShapeError, match=match):
            join_norm(*arguments, out, out, eps=EPS)
    with pytest.raises(DuckShapeError, match="multiple of 16 bytes, got 2 bytes"):
        norm(rows.flatten()[1:65].view(1, 64), weight, out[:1], eps=EPS, is_lifted=True)
