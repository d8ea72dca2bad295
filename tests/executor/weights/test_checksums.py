"""A file's checksums are the known ones, in whatever pieces the bytes come."""

import hashlib

import numpy as np
import pytest

from vllm_duck.executor.weights.checksums import Crc32c, FileDigest


def _crc32c(*parts: bytes) -> str:
    digest = Crc32c()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "00000000"), (b"123456789", "e3069283"), (bytes(32), "8a9136aa")],
)
def test_known_digests(content, expected):
    assert _crc32c(content) == expected


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 1000, 3072, 3081, 7000])
def test_pieces_make_no_difference(num_bytes):
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    whole = _crc32c(content)
    for step in (3, 8, 500, 3072, 3080):
        pieces = [content[i : i + step] for i in range(0, num_bytes, step)]
        assert _crc32c(*pieces) == whole


def test_every_bit_counts():
    content = bytearray(100)
    seen = {_crc32c(bytes(content))}
    for bit in range(800):
        content[bit // 8] ^= 1 << bit % 8
        seen.add(_crc32c(bytes(content)))
        content[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 801


def test_a_file_has_both_checksums_whatever_the_items_of_its_parts():
    array = np.arange(12, dtype=np.float32)
    digest = FileDigest()
    digest.update(array.data)
    assert digest.record() == {
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
        "crc32c": _crc32c(array.tobytes()),
    }
