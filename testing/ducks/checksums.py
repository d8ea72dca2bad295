"""CRC-32C bit by bit, as an obvious reference, and messages that end with it."""


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def sealed(message: bytes) -> bytes:
    """A serialized message without a checksum, with it."""
    return message + b"\x55" + crc32c(message).to_bytes(4, "little")
