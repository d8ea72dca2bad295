"""The CPU's backend: numpy rows, C++ kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm_duck.models.backend import RowIndex
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.cpu.layer import CpuLayer
from vllm_duck.models.cpu.linear import Linear, Norm
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.cpu.threads import Bits, from_bits, to_bits
from vllm_duck.models.cpu.vocabulary import Embedding, LmHead
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches


@dataclass(frozen=True)
class CpuBackend:
    """`models.backend.HostBackend`; rows are the bits of bf16 values [T, H]."""

    def layer(self, dims: Dimensions, layer_idx: int, caches: LayerCaches) -> CpuLayer:
        return CpuLayer(dims, layer_idx, caches)

    def norm(self, size: int, eps: float) -> Norm:
        return Norm(size, eps)

    def linear(self, in_features: int, out_features: int) -> Linear:
        return Linear(in_features, out_features)

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding:
        return Embedding(vocab_size, hidden_size)

    def head(self, vocab_size: int, hidden_size: int) -> LmHead:
        return LmHead(vocab_size, hidden_size)

    def step(self, batch: AttentionBatch, rotations: Tensor) -> CpuStep:
        return CpuStep(batch, rotations.numpy())

    def enter(self, hidden: Tensor) -> Bits:
        return to_bits("hidden", hidden, hidden.shape[-1])

    def leave(self, rows: Bits) -> Tensor:
        return from_bits(rows)

    def take(self, rows: Bits, index: RowIndex) -> Bits:
        return rows[index]

    def concat(self, parts: Sequence[Bits]) -> Bits:
        return np.concatenate(parts)
