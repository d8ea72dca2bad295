"""What kernels do with a row: sums, norms, rotations, and codes of the caches.

In the C++ host's order of sums: 16 chains, folded in halves.
"""

import triton
import triton.language as tl

from vllm_duck.models.cuda.kernels.formats import bf16_bits, e4m3_code


@triton.jit
def load_sum(parts, at, mask, stride, SPLITS: tl.constexpr):
    """The parts of a GEMM's sums, added in rising order."""
    total = tl.load(parts + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def chains(parts, stride, less, SIZE: tl.constexpr, SPLITS: tl.constexpr, ARE_SQUARES):
    """The sum of a row's numbers, or of squares of them less a mean.

    Unrolled, so that the loads do not wait for each other.
    """
    lane = tl.arange(0, 16)
    total = tl.zeros([16], tl.float32)
    for first in tl.static_range(0, SIZE, 16):
        mask = first + lane < SIZE
        x = load_sum(parts, first + lane, mask, stride, SPLITS)
        if ARE_SQUARES:
            x = tl.where(mask, x - less, 0.0)
            x = x * x
        total += x
    total = tl.sum(tl.reshape(total, [2, 8]), 0)
    total = tl.sum(tl.reshape(total, [2, 4]), 0)
    total = tl.sum(tl.reshape(total, [2, 2]), 0)
    return tl.sum(total, 0)


@triton.jit
def rms_scale(squares, SIZE: tl.constexpr, EPS: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, SIZE * 1.0) + EPS))


@triton.jit
def magnitude(x):
    """Orders as |x| does, and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def cache_scale(peak):
    """peak: the largest magnitude of a tile."""
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), 448.0)
    # Zeros, or so close to them that the scale is: nothing may divide by zero.
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def cache_code(x, scale):
    value = tl.div_rn(x, scale)
    value = tl.where(value > 448.0, 448.0, value)
    value = tl.where(value < -448.0, -448.0, value)
    return e4m3_code(value)


@triton.jit
def rotate(real, imaginary, rotation, pair, mask):
    """Channels 2 * pair and the next, turned."""
    cos = tl.load(rotation + 2 * pair, mask=mask, other=1.0)
    sin = tl.load(rotation + 2 * pair + 1, mask=mask, other=0.0)
    return real * cos - imaginary * sin, real * sin + imaginary * cos


@triton.jit
def store_pairs(out, pair, real, imaginary, mask):
    tl.store(out + 2 * pair, bf16_bits(real), mask=mask)
    tl.store(out + 2 * pair + 1, bf16_bits(imaginary), mask=mask)
