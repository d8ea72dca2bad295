"""Every kernel at the official widths, as a layer starts it, and what it may cost.

`python -m testing.gpu.cases 86 90` compiles them all and writes what came out as JSON.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from testing.gpu.ahead import Binary, absent, compiled
from vllm_duck.models.cuda.kernels.gemm import Out, gemm, gemm_heads, gemm_splits
from vllm_duck.models.cuda.kernels.join import join_norm
from vllm_duck.models.cuda.kernels.packing import PackedWeight

HIDDEN, Q_LORA, LATENT, ROPE, NOPE, VALUE, HEADS = 7168, 1536, 512, 64, 128, 128, 128
VOCAB, INTERMEDIATE = 129280, 2048
ROWS = 2

floats = partial(absent, dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    call: Callable[[], None]
    # Loads of 16 bytes that there must be.
    wide_loads: int
    stack_bytes: int = 0
    # Instructions for each weight in the loop over K; None: no GEMM.
    per_weight: float | None = None


def coded(n: int, k: int, *, heads: int = 1, group: int = 128) -> PackedWeight:
    scales = floats(heads, -(-n // group), k // 128)
    return PackedWeight(absent(heads, n, k // 2), scales, group, k)


def plain(n: int, k: int) -> PackedWeight:
    return PackedWeight(absent(1, n, k), None, 128, k)


def _residual(rows: int) -> Callable[[], None]:
    hidden, values = absent(rows, HIDDEN), absent(rows, HEADS * VALUE)
    weight = coded(HIDDEN, HEADS * VALUE)
    return lambda: gemm(values, weight, hidden, Out.RESIDUAL, residual=hidden)


def _join() -> None:
    rows, wide = absent(ROWS, HIDDEN), floats(ROWS, HIDDEN)
    join_norm(rows, wide, wide, floats(HIDDEN), rows, rows, eps=1e-6)


def _key_up() -> None:
    query, nope = absent(ROWS, HEADS, LATENT + ROPE), absent(ROWS, HEADS, NOPE)
    gemm_heads(nope, coded(LATENT, NOPE, heads=HEADS), query[..., :LATENT], Out.BF16)


def _value_up() -> None:
    latent, values = absent(ROWS, HEADS, LATENT), absent(ROWS, HEADS, VALUE)
    gemm_heads(latent, coded(VALUE, LATENT, heads=HEADS), values, Out.LIFTED)


_X = absent(ROWS, HIDDEN)
_DOWN, _UP = Q_LORA + LATENT + ROPE + 128, HEADS * (NOPE + ROPE) + 64 * 128
CASES = {
    "join": Case(_join, wide_loads=12),
    "down": Case(
        lambda: gemm_splits(_X, coded(_DOWN, HIDDEN, group=64), floats(4, ROWS, _DOWN)),
        wide_loads=8,
        per_weight=6.5,
    ),
    "head_weights": Case(
        lambda: gemm_splits(_X, plain(64, HIDDEN), floats(8, ROWS, 64)), wide_loads=8
    ),
    "up": Case(
        lambda: gemm(
            absent(ROWS, Q_LORA), coded(_UP, Q_LORA), floats(ROWS, _UP), Out.WIDE
        ),
        wide_loads=8,
        per_weight=6.5,
    ),
    "key_up": Case(_key_up, wide_loads=4),
    "value_up": Case(_value_up, wide_loads=4, per_weight=6.5),
    "out": Case(_residual(ROWS), wide_loads=8, per_weight=6.5),
    "out of 32 rows": Case(_residual(32), wide_loads=8, per_weight=8),
    "gate and up": Case(
        lambda: gemm(
            _X,
            coded(2 * INTERMEDIATE, HIDDEN),
            absent(ROWS, INTERMEDIATE),
            Out.GATED,
        ),
        wide_loads=8,
        per_weight=6.5,
    ),
    "plain rows": Case(
        lambda: gemm(
            absent(ROWS, 2 * HIDDEN),
            coded(HIDDEN, 2 * HIDDEN),
            absent(ROWS, HIDDEN),
            Out.BF16,
            x_is_lifted=False,
        ),
        wide_loads=8,
        per_weight=9.5,
    ),
    "head": Case(
        lambda: gemm(
            _X, plain(VOCAB, HIDDEN), floats(ROWS, VOCAB), Out.WIDE, x_is_lifted=False
        ),
        wide_loads=8,
        per_weight=2.5,
    ),
}


def measures(binary: Binary) -> dict[str, float]:
    constants = binary.constants
    # Of one program and turn.
    weights = constants.get("BLOCK_N", 1) * 128 * (1 + constants.get("IS_GATED", 0))
    return {
        "shared_bytes": binary.shared_bytes,
        "registers": binary.registers,
        "stack_bytes": binary.stack_bytes,
        "wide_loads": binary.wide_loads,
        "byte_loads": binary.byte_loads,
        "uses_wgmma": binary.uses_wgmma,
        "per_weight": binary.loop_length * 32 * binary.num_warps / weights,
    }


def main(archs: list[int]) -> None:
    found = {
        f"{name} {arch}": [measures(b) for b in compiled(case.call, arch)]
        for name, case in CASES.items()
        for arch in archs
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
