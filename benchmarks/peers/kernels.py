"""The other kernels of the kernel benchmark, each in a process of its own."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.kernel_work import (
    HIDDEN,
    TOPK,
    Size,
    random_expert,
    timed_routing,
    timed_sweep,
)
from vllm_duck.executor.compute.kernel import BLOCK, supported_isas


class Peers:
    """Processes that each hold one peer; a peer that cannot start is left out."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *exc: object) -> None:
        for peer in self.peers:
            peer.pool.shutdown()

    def start(self, kind: type, size: Size, **env: str) -> "Peer | None":
        pool = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            pool.submit(_peer_start, kind, size, env).result()
        except Exception as error:
            print(f"# without {kind.name}: {type(error).__name__}: {error}")
            pool.shutdown()
            return None
        self.peers.append(Peer(pool, kind))
        return self.peers[-1]


class Peer:
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
    return timed_sweep(_PEER.size, rows, _PEER.forward)


def _peer_routed(num_threads: int, rows: int) -> float:
    _PEER.set_threads(num_threads)
    return timed_routing(_PEER.size, rows, _PEER.forward)


class FusedExperts:
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
        gate, up, down = random_expert(size.columns, HIDDEN)
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


class BatchedMatmul:
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
        gate, up, down = random_expert(size.columns, HIDDEN)
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


class KtBest(_Kt):
    target = ">= 1.5"


class KtAvx2(_Kt):
    name = "kt-kernel FP8 avx2"
    compare_with = "avx2"
    target = ">= 6"
