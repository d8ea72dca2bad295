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
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import Result, main, percentiles
from benchmarks.kernel_work import (
    ALL_CORES,
    HIDDEN,
    TOPK,
    OurKernel,
    Size,
    bf16_rows,
    load_layer,
)
from benchmarks.peers.kernels import BatchedMatmul, FusedExperts, KtAvx2, KtBest, Peers
from vllm_duck.executor.compute.kernel import MoeKernel, supported_isas

PREFILL_EXPERTS = 256

READ_TARGETS = {"amx": (0.80, 0.90), "avx512": (0.80, 0.90), "avx2": (0.55, 0.85)}


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
    ours = OurKernel(size)
    threads = sorted({1, ALL_CORES})
    row_counts = (1, 2) if quick else (1, 2, 4, 8)
    with Peers() as peers:
        vllm = peers.start(FusedExperts, size)
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
        for kind, variant in ((KtBest, supported_isas()[0]), (KtAvx2, "avx2")):
            yield from _against_kt(ours, kind, variant, threads, (1, 2))


def _against_kt(ours, kind, variant, threads, row_counts) -> Iterator[Result]:
    """One process for each thread count: its pool cannot be resized, and is slow to
    make because it copies the weights."""
    rates: dict[Any, float] = {}
    peer = None
    for n in threads:
        with Peers() as peers:
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
    ours = OurKernel(size)
    isa = ours.isas[0]
    row_counts = (256,) if quick else (256, 2048)
    with Peers() as peers:
        fused = peers.start(FusedExperts, size)
        matmul = peers.start(BatchedMatmul, size)
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
    ours = OurKernel(big)
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
        self.layer = load_layer(Size(64, 16), hidden=256)
        self.hidden = bf16_rows(rng, 2, 256)
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


if __name__ == "__main__":
    main("kernel", run, __doc__)
