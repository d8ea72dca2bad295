"""The checksum is CRC-32C, whatever the length, the address and the cuts."""

import numpy as np
import pytest

from testing.ducks.checksums import crc32c
from vllm_duck.executor import _kernel


def test_the_check_value_of_the_standard():
    assert crc32c(b"123456789") == 0xE3069283
    assert _kernel.crc32c(b"123456789", 0) == 0xE3069283


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 255, 3071, 3072, 3073, 10_001])
def test_every_length_is_that_of_the_reference(num_bytes):
    data = np.random.default_rng(num_bytes).bytes(num_bytes + 3)
    for begin in range(4):
        part = data[begin : begin + num_bytes]
        view = memoryview(data)[begin : begin + num_bytes]
        assert _kernel.crc32c(view, 0) == crc32c(part)


def test_parts_give_the_checksum_of_the_whole():
    data = np.random.default_rng(0).bytes(9000)
    whole = _kernel.crc32c(data, 0)
    for cut in (0, 1, 1000, 8999, 9000):
        assert _kernel.crc32c(data[cut:], _kernel.crc32c(data[:cut], 0)) == whole


def test_large_data_too_where_the_gil_is_released():
    data = bytes(2 << 20)
    half = _kernel.crc32c(data[: 1 << 20], 0)
    assert _kernel.crc32c(data, 0) == _kernel.crc32c(data[1 << 20 :], half)
