"""Embedding and LM head: vLLM's modules, with the host's GEMM for the logits.

Their weights stay in the mapped file: of the embedding few rows are read, and the head
is packed for its kernel. vLLM would pad them below the vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from vllm_duck.models.cpu.linear import apply_linear, pack_linear
from vllm_duck.models.cpu.threads import Handle
from vllm_duck.models.matrix import Matrix


class Embedding(VocabParallelEmbedding):
    """`models.backend.Embedding`."""

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.matrix = Matrix(vocab_size, hidden_size)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        yield f"{prefix}.weight", self.matrix

    def finish_loading(self) -> None:
        self.weight = _parameter(self.matrix)
        del self.matrix


class LmHead(ParallelLMHead):
    """`models.backend.Head`; `weight` is the file's, beside the packed copy."""

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.matrix = Matrix(vocab_size, hidden_size)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.packed: Handle

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] bf16 -> [T, V] fp32, as accumulated."""
        return apply_linear(
            self.packed, hidden, self.hidden_size, self.vocab_size, dtype=torch.float32
        )

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Matrix]]:
        yield f"{prefix}.weight", self.matrix

    def finish_loading(self) -> None:
        self.packed = pack_linear(self.matrix)
        self.weight = _parameter(self.matrix)
        del self.matrix


def _parameter(matrix: Matrix) -> nn.Parameter:
    """Its bf16 values; the file's own memory if it has them so."""
    weight = matrix.weight
    if matrix.scale is not None:
        weight = matrix.values().to(torch.bfloat16)
    return nn.Parameter(weight, requires_grad=False)
