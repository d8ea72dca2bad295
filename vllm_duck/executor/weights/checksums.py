"""Checksums of a split's files: SHA-256 for people, CRC-32C for loading.

CRC-32C costs a tenth of reading a byte and misses one damage in four billion; SHA-256
would cost more than all other work of loading. `sha256sum` prints the same digits.
"""

import hashlib

from vllm_duck.executor import _kernel


class Crc32c:
    """CRC-32C over bytes that come in pieces."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, part: bytes | memoryview) -> None:
        """Sync: releases the GIL."""
        self._value = _kernel.crc32c(part, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class FileDigest:
    """Both checksums of a file that grows."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._crc32c = Crc32c()

    def update(self, part: bytes | memoryview) -> None:
        self._sha256.update(part)
        self._crc32c.update(part)

    def record(self) -> dict[str, str]:
        """The fields of a FileRecord."""
        return {
            "sha256": self._sha256.hexdigest(),
            "crc32c": self._crc32c.hexdigest(),
        }
