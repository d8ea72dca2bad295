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
from vllm_duck.models.cuda.kernels.attend import attend, num_splits
from vllm_duck.models.cuda.kernels.gemm import Out, gemm, gemm_heads, gemm_splits
from vllm_duck.models.cuda.kernels.index import Context, index_scores, select
from vllm_duck.models.cuda.kernels.join import join_norm
from vllm_duck.models.cuda.kernels.packing import PackedWeight
from vllm_duck.models.cuda.kernels.route import (
    Choice,
    Request,
    router_logits,
    send_request,
)
from vllm_duck.models.cuda.kernels.split import (
    Caches,
    KeyNorms,
    split_down,
    split_up,
)

HIDDEN, Q_LORA, LATENT, ROPE, NOPE, VALUE, HEADS = 7168, 1536, 512, 64, 128, 128, 128
INDEX_DIM, INDEX_HEADS, TOPK, CONTEXT, PAGE = 128, 64, 2048, 131072, 64
EXPERTS, EXPERTS_PER_TOKEN = 256, 8
VOCAB, INTERMEDIATE, SLOTS = 129280, 2048, 4096
ROWS = 2

floats = partial(absent, dtype=torch.float32)
ints = partial(absent, dtype=torch.int32)
longs = partial(absent, dtype=torch.int64)


@dataclass(frozen=True)
class Case:
    call: Callable[[], None]
    # Loads of 16 bytes that there must be, in each of its kernels.
    wide_loads: int | tuple[int, ...]
    stack_bytes: int = 0
    # Instructions for each weight in the loop over K; None: no GEMM.
    per_weight: float | None = None

    def least_wide_loads(self) -> tuple[int, ...]:
        least = self.wide_loads
        return least if isinstance(least, tuple) else (least,)


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


def caches() -> Caches:
    latent = absent(SLOTS, 656, dtype=torch.uint8)
    return Caches(latent, absent(SLOTS, 132, dtype=torch.uint8))


def _split_down() -> None:
    norms = KeyNorms(
        floats(Q_LORA),
        floats(LATENT),
        floats(INDEX_DIM),
        floats(INDEX_DIM),
        eps=1e-6,
        index_eps=1e-6,
    )
    split_down(
        floats(4, ROWS, _DOWN),
        floats(8, ROWS, INDEX_HEADS),
        longs(ROWS),
        floats(ROWS, ROPE),
        norms,
        caches(),
        absent(ROWS, Q_LORA),
        floats(ROWS, INDEX_HEADS),
        index_scale=0.01,
    )


def _split_up() -> None:
    split_up(
        floats(ROWS, _UP),
        floats(ROWS, ROPE),
        absent(ROWS, HEADS, NOPE),
        absent(ROWS, HEADS, LATENT + ROPE),
        absent(ROWS, INDEX_HEADS, INDEX_DIM),
    )


def _context() -> Context:
    return Context(ints(ROWS), ints(ROWS), ints(1, CONTEXT // PAGE), PAGE)


def _index_scores() -> None:
    index_scores(
        absent(ROWS, INDEX_HEADS, INDEX_DIM),
        floats(ROWS, INDEX_HEADS),
        caches().index,
        _context(),
        floats(ROWS, CONTEXT),
        topk=TOPK,
    )


def _attend() -> None:
    splits = num_splits(TOPK)
    attend(
        absent(ROWS, HEADS, LATENT + ROPE),
        caches().latent,
        ints(ROWS, TOPK),
        ints(ROWS),
        floats(ROWS, splits, HEADS, LATENT),
        floats(ROWS, splits, HEADS, 2),
        absent(ROWS, HEADS, LATENT),
        scale=0.1,
    )


def _send_request() -> None:
    request = Request(
        hidden=absent(ROWS, HIDDEN),
        ids=ints(ROWS, EXPERTS_PER_TOKEN),
        weights=floats(ROWS, EXPERTS_PER_TOKEN),
        flag=longs(1),
        sequence=longs(1),
        arrivals=ints(1),
    )
    logits, bias = floats(8, ROWS, EXPERTS), floats(EXPERTS)
    send_request(_X, logits, bias, Choice(8, 4, True, 2.5), request)


def _key_up() -> None:
    query, nope = absent(ROWS, HEADS, LATENT + ROPE), absent(ROWS, HEADS, NOPE)
    gemm_heads(nope, coded(LATENT, NOPE, heads=HEADS), query[..., :LATENT], Out.BF16)


def _value_up() -> None:
    latent, values = absent(ROWS, HEADS, LATENT), absent(ROWS, HEADS, VALUE)
    gemm_heads(latent, coded(VALUE, LATENT, heads=HEADS), values, Out.LIFTED)


_X = absent(ROWS, HIDDEN)
_DOWN = Q_LORA + LATENT + ROPE + INDEX_DIM
_UP = HEADS * (NOPE + ROPE) + INDEX_HEADS * INDEX_DIM
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
    "split down": Case(_split_down, wide_loads=4),
    "split up": Case(_split_up, wide_loads=0),
    "up": Case(
        lambda: gemm(
            absent(ROWS, Q_LORA), coded(_UP, Q_LORA), floats(ROWS, _UP), Out.WIDE
        ),
        wide_loads=8,
        per_weight=6.5,
    ),
    "key_up": Case(_key_up, wide_loads=4),
    "value_up": Case(_value_up, wide_loads=4, per_weight=6.5),
    "index scores": Case(_index_scores, wide_loads=4),
    "select": Case(
        lambda: select(floats(ROWS, CONTEXT), _context(), ints(ROWS, TOPK), ints(ROWS)),
        wide_loads=0,
    ),
    "attend": Case(_attend, wide_loads=(8, 1), stack_bytes=64),
    "router logits": Case(
        lambda: router_logits(_X, floats(EXPERTS, HIDDEN), floats(8, ROWS, EXPERTS)),
        wide_loads=8,
    ),
    "request": Case(_send_request, wide_loads=2),
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
