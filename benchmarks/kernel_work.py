"""What the kernel benchmark computes: one layer of random experts, calls, our side."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.peers.read_memory import bytes_per_s
from vllm_duck.executor.compute.kernel import (
    BLOCK,
    LayerWeights,
    MoeKernel,
    supported_isas,
)
from vllm_duck.executor.system.cpus import physical_cores

HIDDEN = 7168
TOPK = 8
ALL_CORES = len(physical_cores())


@dataclass(frozen=True)
class Size:
    """What a case is about: I columns and how many experts are in memory."""

    columns: int
    num_experts: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.columns * HIDDEN

    @property
    def num_column_blocks(self) -> int:
        return -(-self.columns // BLOCK)


class OurKernel:
    def __init__(self, size: Size) -> None:
        self.size = size
        self.isas = supported_isas()
        self.layer = load_layer(size)
        self.kernels: dict[tuple[str, int], MoeKernel] = {}

    def kernel(self, isa: str, num_threads: int) -> MoeKernel:
        key = isa, num_threads
        if key not in self.kernels:
            self.kernels[key] = MoeKernel(num_threads=num_threads, isa=isa)
        return self.kernels[key]

    def read(self, num_threads: int) -> float:
        """Seconds that as much memory takes without any work."""
        num_bytes = self.size.num_experts * self.size.expert_bytes
        return num_bytes / bytes_per_s(num_threads)

    def sweep(self, isa: str, num_threads: int, rows: int) -> float:
        """Every expert once, eight a call, the same eight for all rows."""
        kernel = self.kernel(isa, num_threads)
        return timed_sweep(
            self.size, rows, lambda h, i, w, o: self._forward(kernel, h, i, w, o)
        )

    def routed(self, isa: str, rows: int) -> float:
        kernel = self.kernel(isa, ALL_CORES)
        return timed_routing(
            self.size, rows, lambda h, i, w, o: self._forward(kernel, h, i, w, o)
        )

    def one_call(self, kernel: MoeKernel, index: int) -> float:
        first = index * TOPK % self.size.num_experts
        call = make_call(1, np.arange(first, first + TOPK, dtype=np.int32)[None])
        start = time.perf_counter()
        self._forward(kernel, *call)
        return time.perf_counter() - start

    def _forward(self, kernel, hidden, ids, weights, out) -> None:
        kernel.forward(
            self.layer,
            hidden,
            ids,
            weights,
            expert_lo=0,
            n_routed_experts=self.size.num_experts,
            out=out,
        )


def timed_sweep(size: Size, rows: int, forward: Callable[..., None]) -> float:
    first_ids = range(0, size.num_experts, TOPK)
    ids = np.arange(TOPK, dtype=np.int32)
    calls = [make_call(rows, np.tile(ids + e, (rows, 1))) for e in first_ids]
    start = time.perf_counter()
    for call in calls:
        forward(*call)
    return time.perf_counter() - start


def timed_routing(size: Size, rows: int, forward: Callable[..., None]) -> float:
    call = make_call(rows, _random_ids(size.num_experts, rows))
    start = time.perf_counter()
    forward(*call)
    return time.perf_counter() - start


def _random_ids(num_experts: int, rows: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    draws = [rng.choice(num_experts, TOPK, replace=False) for _ in range(rows)]
    return np.array(draws, np.int32)


def make_call(rows: int, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    weights = np.full((rows, TOPK), 1 / TOPK, np.float32)
    return bf16_rows(rng, rows, HIDDEN), ids, weights, np.empty((rows, HIDDEN), "f4")


def bf16_rows(rng: np.random.Generator, rows: int, hidden: int) -> np.ndarray:
    values = rng.standard_normal((rows, hidden), np.float32).view(np.uint32)
    return (values >> 16).astype(np.uint16)


def random_expert(columns: int, hidden: int) -> tuple[np.ndarray, ...]:
    """Gate, up and down as e4m3 codes of normal values whose largest is near 448."""
    rng = np.random.default_rng(2)
    magnitudes = np.abs(rng.standard_normal(3 * columns * hidden, np.float32)) * 112
    exponents = np.clip(np.floor(np.log2(magnitudes + 1e-9)), -6, 8)
    codes = np.rint(magnitudes / 2**exponents * 8 - 8 + 8 * (exponents + 7))
    codes = np.clip(codes, 0, 0x7E).astype(np.uint8)
    codes |= rng.integers(0, 2, codes.shape, dtype=np.uint8) << 7
    gate, up, down = codes.reshape(3, -1)
    return (
        gate.reshape(columns, hidden),
        up.reshape(columns, hidden),
        down.reshape(hidden, columns),
    )


def load_layer(size: Size, hidden: int = HIDDEN) -> LayerWeights:
    layer = LayerWeights(
        num_experts=size.num_experts,
        hidden_size=hidden,
        num_columns=size.columns,
        column_offset=0,
        weight_format="e4m3-block128",
    )
    gate, up, down = random_expert(size.columns, hidden)
    scale = np.full((layer.num_column_blocks, layer.num_hidden_blocks), 1e-4, "f4")
    down_scale = np.ascontiguousarray(scale.T)
    for idx in range(size.num_experts):
        layer.load_expert(
            idx,
            gate=gate,
            up=up,
            down=down,
            gate_scale=scale,
            up_scale=scale,
            down_scale=down_scale,
        )
    return layer
