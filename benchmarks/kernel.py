"""The MoE kernel against the machine's read bandwidth and against other kernels.

Decode: e4m3 weights streamed from memory, all sides over the same number of bytes, a
working set several times the L3 cache, each call eight experts that no recent call
used. The yardstick reads the same packed weights with the same threads and does nothing
else. Prefill: 256 and 2048 rows over 256 experts.

Peers, measured when they can be imported: vLLM's fused_experts_cpu (the [cpu] extra)
and torch's bf16 matmul on dequantised weights (pre-gathered rows, no routing), and
KTransformers (pip install kt-kernel gguf). Each peer lives in a process of its own and
takes turns with ours; a peer gets the thread count it does best with, and the row says
which.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import Result, main, percentiles
from vllm_duck.executor.kernel import (
    BLOCK,
    LayerWeights,
    MoeKernel,
    physical_cores,
    supported_isas,
)

HIDDEN = 7168
TOPK = 8
PREFILL_EXPERTS = 256
ALL_CORES = len(physical_cores())

READ_TARGETS = {"amx": (0.80, 0.90), "avx512": (0.80, 0.90), "avx2": (0.55, 0.85)}


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


def run(quick: bool) -> Iterator[Result]:
    columns = (64,) if quick else (64, 128, 256)
    for num_columns in columns:
        yield from decode(num_columns, quick)
    yield from prefill(64 if quick else 128, quick)
    yield from latency(quick)


# --- decode -------------------------------------------------------------------------


def decode(columns: int, quick: bool) -> Iterator[Result]:
    size = _decode_size(columns, 1.0 if quick else 2.0)
    rounds = 3 if quick else 7
    ours = _Ours(size)
    threads = sorted({1, ALL_CORES})
    row_counts = (1, 2) if quick else (1, 2, 4, 8)
    with _Peers() as peers:
        vllm = peers.start(_Vllm, size)
        sides: dict[Any, Callable[[], float]] = {}
        for n in threads:
            sides["read", n] = lambda n=n: ours.read(n)
            for isa, rows in itertools.product(ours.isas, row_counts):
                if isa != "portable":
                    sides[isa, n, rows] = lambda a=(isa, n, rows): ours.sweep(*a)
            for rows in row_counts if vllm else ():
                sides[vllm, n, rows] = lambda a=(n, rows): vllm.sweep(*a)
        seconds = _alternate(sides, rounds)
    rates = {
        key: size.num_experts * size.expert_bytes / s for key, s in seconds.items()
    }
    yield from _bandwidth_rows(columns, rates, threads, row_counts)
    for rows in row_counts if vllm else ():
        yield _against_peer(columns, rates, threads, vllm, rows)
    if not quick:
        for kind, variant in ((_KtBest, supported_isas()[0]), (_KtAvx2, "avx2")):
            yield from _against_kt(ours, kind, variant, threads, (1, 2))


def _against_kt(ours, kind, variant, threads, row_counts) -> Iterator[Result]:
    """One process for each thread count: its pool cannot be resized, and is slow to
    make because it copies the weights."""
    rates: dict[Any, float] = {}
    peer = None
    for n in threads:
        with _Peers() as peers:
            started = peers.start(kind, ours.size, KT_KERNEL_CPU_VARIANT=variant)
            if started is None:
                return
            peer = peer or started
            sides: dict[Any, Callable[[], float]] = {}
            for rows in row_counts:
                isa = peer.compare_with
                sides[isa, n, rows] = lambda a=(isa, n, rows): ours.sweep(*a)
                sides[peer, n, rows] = lambda p=started, a=(n, rows): p.sweep(*a)
            for key, s in _alternate(sides, 3).items():
                rates[key] = ours.size.num_experts * ours.size.expert_bytes / s
    for rows in row_counts:
        yield _against_peer(ours.size.columns, rates, threads, peer, rows)


def _bandwidth_rows(columns, rates, threads, row_counts) -> Iterator[Result]:
    for isa, n, rows in itertools.product(supported_isas(), threads, row_counts[:2]):
        if isa not in READ_TARGETS:
            continue
        cores = "one core" if n == 1 else "all cores"
        fraction = rates[isa, n, rows] / rates["read", n]
        yield Result(
            case=f"{isa} I={columns} rows={rows} {cores}",
            metric="bandwidth_fraction",
            value=fraction,
            unit=f"of {rates['read', n] / 1e9:.1f} GB/s read",
            target=f">= {READ_TARGETS[isa][n > 1]:.2f}",
        )


def _against_peer(columns, rates, threads, peer, rows) -> Result:
    """Both sides with the thread count each does best with."""
    isa = peer.compare_with
    mine = max(threads, key=lambda n: rates[isa, n, rows])
    theirs = max(threads, key=lambda n: rates[peer, n, rows])
    return Result(
        case=f"{isa} I={columns} rows={rows} threads={mine}",
        metric="bandwidth",
        value=rates[isa, mine, rows] / 1e9,
        unit="GB/s",
        peer=f"{peer.name} threads={theirs}",
        peer_value=rates[peer, theirs, rows] / 1e9,
        target=peer.target,
    )


def _decode_size(columns: int, gigabytes: float) -> Size:
    experts = int(gigabytes * 1e9 / (3 * columns * HIDDEN))
    return Size(columns, experts // TOPK * TOPK)


def _alternate(sides: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, float]:
    """Median seconds of each side; they take turns: all see the same machine."""
    seconds: dict[Any, list[float]] = {key: [] for key in sides}
    for _ in range(rounds):
        for key, side in sides.items():
            seconds[key].append(side())
    return {key: median(values) for key, values in seconds.items()}


# --- prefill ------------------------------------------------------------------------


def prefill(columns: int, quick: bool) -> Iterator[Result]:
    size = Size(columns, PREFILL_EXPERTS)
    ours = _Ours(size)
    isa = ours.isas[0]
    row_counts = (256,) if quick else (256, 2048)
    with _Peers() as peers:
        fused = peers.start(_Vllm, size)
        matmul = peers.start(_Matmul, size)
        sides: dict[Any, Callable[[], float]] = {}
        for rows in row_counts:
            for name in ours.isas if not quick else ours.isas[:1]:
                if name != "portable":
                    sides[name, rows] = lambda a=(name, rows): ours.routed(*a)
            for peer in (fused, matmul):
                if peer:
                    sides[peer, rows] = lambda p=peer, r=rows: p.routed(ALL_CORES, r)
        seconds = _alternate(sides, 3 if quick else 7)
    for (side, rows), s in seconds.items():
        gflops = 6e-9 * rows * TOPK * columns * HIDDEN
        if isinstance(side, str):
            case = f"{side} I={columns} rows={rows} threads={ALL_CORES}"
            yield Result(case, "compute", gflops / s, "GFLOP/s")
        else:
            yield Result(
                case=f"{isa} I={columns} rows={rows} threads={ALL_CORES}",
                metric="compute",
                value=gflops / seconds[isa, rows],
                unit="GFLOP/s",
                peer=f"{side.name} threads={ALL_CORES}",
                peer_value=gflops / s,
                target=side.target,
            )


# --- latency ------------------------------------------------------------------------


def latency(quick: bool) -> Iterator[Result]:
    kernel = MoeKernel()
    big, tiny = Size(64, 64), None
    ours = _Ours(big)
    count = 100 if quick else 500
    hot = [ours.one_call(kernel, i) for i in range(count)]
    cold = []
    for i in range(count // 2):
        time.sleep(0.01)
        cold.append(ours.one_call(kernel, i))
    case = f"{kernel.isa} H={HIDDEN} I=64 rows=1 threads={kernel.num_threads}"
    yield from _percentile_rows(f"{case}, back to back", hot)
    yield from _percentile_rows(f"{case}, after 10 ms of sleep", cold)
    before, start = time.process_time(), time.perf_counter()
    time.sleep(0.5)
    busy = (time.process_time() - before) / (time.perf_counter() - start)
    yield Result("idle pool", "cpu", 100 * busy, "% of a core", target="0")
    for num_threads in sorted({1, kernel.num_threads}):
        kernel = MoeKernel(num_threads=num_threads)
        tiny = _TinyCall(kernel)
        for rows in (1, 2):
            yield from _percentile_rows(
                f"{kernel.isa} H=256 I=64 K=4 rows={rows} threads={num_threads}",
                [tiny(rows) for _ in range(2000)],
            )


def _percentile_rows(case: str, seconds: list[float]) -> Iterator[Result]:
    p50, p99 = percentiles(seconds)
    yield Result(case, "call_p50", 1e6 * p50, "us")
    yield Result(case, "call_p99", 1e6 * p99, "us")


class _TinyCall:
    """The bundled model's layer as one of two ducks sees it."""

    def __init__(self, kernel: MoeKernel) -> None:
        rng = np.random.default_rng(0)
        self.kernel = kernel
        self.layer = _load_layer(Size(64, 16), hidden=256)
        self.hidden = _bf16_rows(rng, 2, 256)
        self.ids = rng.permuted(np.tile(np.arange(16, dtype=np.int32), (2, 1)), axis=1)

    def __call__(self, rows: int) -> float:
        weights = np.ones((rows, 4), np.float32)
        out = np.empty((rows, 256), np.float32)
        ids = np.ascontiguousarray(self.ids[:rows, :4])
        start = time.perf_counter()
        self.kernel.forward(
            self.layer,
            self.hidden[:rows],
            ids,
            weights,
            expert_lo=0,
            n_routed_experts=16,
            out=out,
        )
        return time.perf_counter() - start


# --- our side -----------------------------------------------------------------------


class _Ours:
    def __init__(self, size: Size) -> None:
        self.size = size
        self.isas = supported_isas()
        self.layer = _load_layer(size)
        self.kernels: dict[tuple[str, int], MoeKernel] = {}

    def kernel(self, isa: str, num_threads: int) -> MoeKernel:
        key = isa, num_threads
        if key not in self.kernels:
            self.kernels[key] = MoeKernel(num_threads=num_threads, isa=isa)
        return self.kernels[key]

    def read(self, num_threads: int) -> float:
        kernel = self.kernel(self.isas[0], num_threads)
        start = time.perf_counter()
        kernel.read_weights(self.layer)
        return time.perf_counter() - start

    def sweep(self, isa: str, num_threads: int, rows: int) -> float:
        """Every expert once, eight a call, the same eight for all rows."""
        kernel = self.kernel(isa, num_threads)
        return _sweep(
            self.size, rows, lambda h, i, w, o: self._forward(kernel, h, i, w, o)
        )

    def routed(self, isa: str, rows: int) -> float:
        kernel = self.kernel(isa, ALL_CORES)
        return _routed(
            self.size, rows, lambda h, i, w, o: self._forward(kernel, h, i, w, o)
        )

    def one_call(self, kernel: MoeKernel, index: int) -> float:
        first = index * TOPK % self.size.num_experts
        call = _make_call(1, np.arange(first, first + TOPK, dtype=np.int32)[None])
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


def _sweep(size: Size, rows: int, forward: Callable[..., None]) -> float:
    first_ids = range(0, size.num_experts, TOPK)
    ids = np.arange(TOPK, dtype=np.int32)
    calls = [_make_call(rows, np.tile(ids + e, (rows, 1))) for e in first_ids]
    start = time.perf_counter()
    for call in calls:
        forward(*call)
    return time.perf_counter() - start


def _routed(size: Size, rows: int, forward: Callable[..., None]) -> float:
    call = _make_call(rows, _random_ids(size.num_experts, rows))
    start = time.perf_counter()
    forward(*call)
    return time.perf_counter() - start


def _random_ids(num_experts: int, rows: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    draws = [rng.choice(num_experts, TOPK, replace=False) for _ in range(rows)]
    return np.array(draws, np.int32)


def _make_call(rows: int, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    weights = np.full((rows, TOPK), 1 / TOPK, np.float32)
    return _bf16_rows(rng, rows, HIDDEN), ids, weights, np.empty((rows, HIDDEN), "f4")


def _bf16_rows(rng: np.random.Generator, rows: int, hidden: int) -> np.ndarray:
    values = rng.standard_normal((rows, hidden), np.float32).view(np.uint32)
    return (values >> 16).astype(np.uint16)


def _random_expert(columns: int, hidden: int) -> tuple[np.ndarray, ...]:
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


def _load_layer(size: Size, hidden: int = HIDDEN) -> LayerWeights:
    layer = LayerWeights.allocate(
        shard_num_experts=size.num_experts,
        hidden_size=hidden,
        num_columns=size.columns,
        column_offset=0,
        weight_format="e4m3-block128",
    )
    gate, up, down = _random_expert(size.columns, hidden)
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


# --- peers --------------------------------------------------------------------------


class _Peers:
    """Processes that each hold one peer; a peer that cannot start is left out."""

    def __init__(self) -> None:
        self.peers: list[_Peer] = []

    def __enter__(self) -> "_Peers":
        return self

    def __exit__(self, *exc: object) -> None:
        for peer in self.peers:
            peer.pool.shutdown()

    def start(self, kind: type, size: Size, **env: str) -> "_Peer | None":
        pool = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            pool.submit(_peer_start, kind, size, env).result()
        except Exception as error:
            print(f"# without {kind.name}: {type(error).__name__}: {error}")
            pool.shutdown()
            return None
        self.peers.append(_Peer(pool, kind))
        return self.peers[-1]


class _Peer:
    def __init__(self, pool: ProcessPoolExecutor, kind: type) -> None:
        self.pool = pool
        self.name, self.target = kind.name, kind.target
        self.compare_with = kind.compare_with or supported_isas()[0]

    def sweep(self, num_threads: int, rows: int) -> float:
        return self.pool.submit(_peer_sweep, num_threads, rows).result()

    def routed(self, num_threads: int, rows: int) -> float:
        return self.pool.submit(_peer_routed, num_threads, rows).result()


_PEER: Any = None


def _peer_start(kind: type, size: Size, env: dict[str, str]) -> None:
    global _PEER
    os.environ.update(env)
    _PEER = kind(size)


def _peer_sweep(num_threads: int, rows: int) -> float:
    _PEER.set_threads(num_threads)
    return _sweep(_PEER.size, rows, _PEER.forward)


def _peer_routed(num_threads: int, rows: int) -> float:
    _PEER.set_threads(num_threads)
    return _routed(_PEER.size, rows, _PEER.forward)


class _Vllm:
    """vLLM's fused_experts_cpu on packed e4m3 weights, through its own custom op."""

    name = "fused_experts_cpu"
    compare_with = ""
    target = ">= 1.0"

    def __init__(self, size: Size) -> None:
        import torch
        from vllm import _custom_ops
        from vllm._custom_ops import CPUQuantMethod

        self.torch, self.ops, self.method = torch, _custom_ops, CPUQuantMethod
        self.size = size
        gate, up, down = _random_expert(size.columns, HIDDEN)
        pack = torch.ops._C.convert_weight_packed
        self.w13 = self._repeat(pack, np.concatenate([gate, up]))
        self.w2 = self._repeat(pack, down)
        blocks = size.num_column_blocks, HIDDEN // BLOCK
        n = size.num_experts
        self.s13 = torch.full((n, -(-2 * size.columns // BLOCK), blocks[1]), 1e-4)
        self.s2 = torch.full((n, blocks[1], blocks[0]), 1e-4)

    def _repeat(self, pack, codes: np.ndarray):
        torch = self.torch
        one = torch.from_numpy(codes).view(torch.float8_e4m3fn)[None]
        packed = pack(one)
        return packed.repeat(self.size.num_experts, *[1] * (packed.dim() - 1))

    def set_threads(self, num_threads: int) -> None:
        self.torch.set_num_threads(num_threads)

    def forward(self, hidden, ids, weights, out) -> None:
        torch = self.torch
        x = torch.from_numpy(hidden).view(torch.bfloat16)
        self.ops.fused_experts_cpu(
            torch.empty_like(x),
            x,
            self.w13,
            self.w2,
            torch.from_numpy(weights),
            torch.from_numpy(ids),
            self.method.FP8_W8A16,
            self.s13,
            self.s2,
            None,
            None,
            [BLOCK, BLOCK],
        )


class _Matmul:
    """torch's bf16 matmul, expert by expert, on rows that are gathered already."""

    name = "torch bf16 matmul"
    compare_with = ""
    target = ">= 0.8"

    def __init__(self, size: Size) -> None:
        import torch

        self.torch, self.size = torch, size
        shape = size.num_experts, 2 * size.columns, HIDDEN
        self.w13 = torch.randn(shape, dtype=torch.bfloat16)
        self.w2 = torch.randn(shape[0], HIDDEN, size.columns, dtype=torch.bfloat16)

    def set_threads(self, num_threads: int) -> None:
        self.torch.set_num_threads(num_threads)

    def forward(self, hidden, ids, weights, out) -> None:
        torch = self.torch
        x = torch.from_numpy(hidden).view(torch.bfloat16)
        for expert, count in enumerate(np.bincount(ids.ravel())):
            if count:
                act = x[:count] @ self.w13[expert].T
                act[:, : self.size.columns] @ self.w2[expert].T


class _Kt:
    name = "kt-kernel FP8"
    compare_with = ""
    target = ""

    def __init__(self, size: Size) -> None:
        import torch
        from kt_kernel import kt_kernel_ext

        if size.columns % BLOCK:
            raise ValueError("needs columns in multiples of 128")
        self.torch, self.ext, self.size = torch, kt_kernel_ext, size
        gate, up, down = _random_expert(size.columns, HIDDEN)
        tile = size.num_column_blocks, HIDDEN // BLOCK
        scales = [torch.full(s, 1e-4) for s in (tile, tile, tile[::-1])]
        arrays = [torch.from_numpy(a) for a in (gate, up, down)]
        # One copy of an expert each: the kernel may use the weights in place.
        self.weights = [[a.clone() for _ in range(size.num_experts)] for a in arrays]
        self.scales = scales
        self.infer: Any = None

    def set_threads(self, num_threads: int) -> None:
        if self.infer is None:
            self.infer, self.moe = self._make(num_threads)

    def _make(self, num_threads: int) -> Any:
        ext, size, torch = self.ext, self.size, self.torch
        pool = ext.WorkerPoolConfig()
        pool.subpool_count = 1
        pool.subpool_numa_map = [0]
        pool.subpool_thread_count = [num_threads]
        infer = ext.CPUInfer(pool)
        on_gpu = torch.zeros(size.num_experts, dtype=torch.bool)
        config = ext.moe.MOEConfig(
            size.num_experts, TOPK, HIDDEN, size.columns, on_gpu.data_ptr()
        )
        config.layer_idx = 0
        config.pool = infer.backend_
        config.max_len = 16
        for name, tensors, scale in zip(
            ("gate", "up", "down"), self.weights, self.scales, strict=True
        ):
            setattr(config, f"{name}_projs", [[t.data_ptr() for t in tensors]])
            setattr(config, f"{name}_scales", [[scale.data_ptr()] * len(tensors)])
        config.quant_config.bits = 8
        config.quant_config.group_size = BLOCK
        config.quant_config.zero_point = False
        kind = getattr(ext.moe, "AMXFP8_MOE", None) or ext.moe.AVX2FP8_MOE
        moe = kind(config)
        identity = torch.arange(size.num_experts, dtype=torch.int64)
        infer.submit(moe.load_weights_task(identity.data_ptr()))
        infer.sync()
        self.kept_alive = on_gpu, identity
        return infer, moe

    def forward(self, hidden, ids, weights, out) -> None:
        torch = self.torch
        count = torch.tensor([len(hidden)], dtype=torch.int32)
        wide_ids = torch.from_numpy(ids.astype(np.int64))
        self.infer.submit(
            self.moe.forward_task(
                count.data_ptr(),
                TOPK,
                wide_ids.data_ptr(),
                weights.ctypes.data,
                hidden.ctypes.data,
                out.ctypes.data,
                False,
            )
        )
        self.infer.sync()


class _KtBest(_Kt):
    target = ">= 1.5"


class _KtAvx2(_Kt):
    name = "kt-kernel FP8 avx2"
    compare_with = "avx2"
    target = ">= 6"


if __name__ == "__main__":
    main("kernel", run, __doc__)
