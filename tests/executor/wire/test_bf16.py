"""bf16 conversions round to nearest even, and widen exactly."""

import numpy as np
import pytest

from testing.ducks.bf16 import f32_to_bf16
from vllm_duck.executor.wire.bf16 import bf16_to_f32


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        # bf16 has 8 significant bits: the step at 1 is 2^-7, a tie is at 2^-8.
        (1 + 2**-8, 1.0),
        (1 + 3 * 2**-8, 1 + 2**-6),
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-(1 + 3 * 2**-8), -(1 + 2**-6)),
        (3.4e38, np.inf),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
        (0.0, 0.0),
    ],
)
def test_rounding_is_to_nearest_even(value, expected):
    got = bf16_to_f32(f32_to_bf16(np.array([value], np.float32)))
    assert got[0] == np.float32(expected)


def test_nan_stays_nan_whatever_its_bits():
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(bits.view(np.float32)))).all()


def test_every_bf16_survives_the_way_there_and_back():
    bits = np.arange(2**16, dtype=np.uint16)
    wide = bf16_to_f32(bits)
    finite = ~np.isnan(wide)
    np.testing.assert_array_equal(f32_to_bf16(wide)[finite], bits[finite])
