"""The number formats of all kernels, by integer arithmetic.

The same bits come out on every GPU and in Triton's interpreter, whose bf16 and e4m3
are wrong: it truncates, and multiplies bit patterns. A number is an fp32 register
whatever it was in memory; only what a dot product takes is converted, on a GPU alone.
"""

import triton
import triton.language as tl

# A GPU makes dot products of bf16, the interpreter of the same numbers in fp64.
IS_NATIVE = tl.constexpr(not triton.knobs.runtime.interpret)

# Of a row that enters a matrix; the matrix has 2**-120 and its scales the rest.
LIFT = 2.0**100
CODE_LIFT = 2.0**20


@triton.jit
def load_bf16(pointer, mask=None):
    """uint16 memory -> fp32; what is masked is 0."""
    bits = tl.load(pointer, mask=mask, other=None if mask is None else 0)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """fp32 -> uint16, to nearest even; NaN becomes 0x7fc0, as in simd/bf16.h."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def round_bf16(x):
    """fp32 -> the nearest bf16 number, as fp32."""
    return (bf16_bits(x).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code):
    """uint8 -> fp32, exact with subnormals: 2**120 is between the exponents' biases.

    NaN codes become +-480: nobody writes them.
    """
    wide = code.to(tl.uint32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def e4m3_code(x):
    """fp32, |x| <= 448 or NaN -> uint8, to nearest even, as in simd/e4m3.h."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is that of the sum with 2**14.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def operand(x):
    """A bf16 number in fp32 -> what `dot` takes; convert once, use often."""
    if IS_NATIVE:
        return x.to(tl.bfloat16)
    else:
        return x


@triton.jit
def rounded_operand(x):
    """fp32 -> the nearest bf16 number as `dot` takes it, which a GPU converts to."""
    if IS_NATIVE:
        return x.to(tl.bfloat16)
    else:
        return round_bf16(x)


@triton.jit
def operand_value(x):
    """The inverse of `operand`."""
    if IS_NATIVE:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def bits_operand(bits):
    """The bits of a bf16 number, uint16 -> what `dot` takes."""
    if IS_NATIVE:
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def pair_operands(pair):
    """Two e4m3 codes side by side, uint16 -> the lower and the upper, times 2**-120."""
    low = ((pair & 0x80) << 8) | ((pair & 0x7F) << 4)
    high = (pair & 0x8000) | ((pair & 0x7F00) >> 4)
    return bits_operand(low), bits_operand(high)


@triton.jit
def lifted_bits(bits):
    """The bits of a bf16 number -> those of 2**100 times it."""
    wide = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    lifted = wide * 1.2676506002282294e30
    return (lifted.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def dot(a, b, c):
    """c + a . b of operands, accumulated in fp32."""
    if IS_NATIVE:
        return tl.dot(a, b, c)
    else:
        # Sums of fp64 do not show where in a tile a row is; numpy's of fp32 do.
        a, b, c = a.to(tl.float64), b.to(tl.float64), c.to(tl.float64)
        return tl.dot(a, b, c).to(tl.float32)


@triton.jit
def ordered(x):
    """fp32 -> uint32 that orders as the numbers do; -0 equals 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def exp_clamped(x):
    """exp(x) for x in [-87, 88], the bits of simd/silu.h."""
    x = tl.where(x < -87.0, -87.0, x)
    x = tl.where(x > 88.0, 88.0, x)
    shifted = x * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    exponent = shifted.to(tl.uint32, bitcast=True) << 23
    return (p.to(tl.uint32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), the bits of simd/silu.h."""
    e = tl.where(x < -88.0, float("inf"), exp_clamped(-x))
    return tl.div_rn(x, 1.0 + e)
