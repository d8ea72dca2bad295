"""Damage: of bytes, and of JSON by its nodes."""

import json
import random
from typing import Any

# Lengths and counts that overflow something somewhere.
_ABSURD = (0, 1, 127, 128, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)
_NUMBERS = (*_ABSURD, -1, 10**30, 0.5, 1e308, float("nan"), float("inf"), -0.0)
_OTHERS: tuple[Any, ...] = (
    *(None, True, False, "", "x", "0", "\u0000", "../../etc/passwd", "a" * 5000),
    *([], {}, [[]], [0, 1], {"a": 1}, [None], "fp8", "bf16", [128, 128], "\ud800"),
)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to four of: flipped, cut out, doubled, turned, random and absurd bytes."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at, size = rng.randrange(len(out) + 1), rng.randrange(1, 40)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + size]
            case 2:
                out[at:at] = out[at : at + size]
            case 3:
                out[at : at + size] = out[at : at + size][::-1]
            case 4:
                out[at : at + size] = rng.randbytes(size)
            case 5:
                out[at : at + 4] = b"\xff\xff\xff\xff"
            case 6:
                out[at : at + 1] = varint(rng.choice(_ABSURD))
    # A third of them end early.
    return bytes(out[: rng.randrange(len(out) + 1)] if rng.random() < 1 / 3 else out)


def damaged_json(text: bytes, rng: random.Random) -> bytes:
    """One to three nodes replaced, left out, doubled or renamed."""
    tree = json.loads(text)
    for _ in range(rng.randrange(1, 4)):
        tree = _damage_node(tree, rng)
    return json.dumps(tree).encode(errors="surrogatepass")


def _damage_node(tree: Any, rng: random.Random) -> Any:
    """Walks down to a node at random, and damages it."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.05:
        return rng.choice(rng.choice((_NUMBERS, _OTHERS)))
    if isinstance(tree, list):
        at = rng.randrange(len(tree))
        match rng.randrange(6):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return [*tree, tree[at]]
        return [*tree[:at], _damage_node(tree[at], rng), *tree[at + 1 :]]
    key = rng.choice(list(tree))
    match rng.randrange(6):
        case 0:
            return {name: value for name, value in tree.items() if name != key}
        case 1:
            return {**tree, f"{key}x": tree[key]}
    return {**tree, key: _damage_node(tree[key], rng)}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
