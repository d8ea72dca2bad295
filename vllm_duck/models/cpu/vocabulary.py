"""Embedding and LM head: vLLM's modules, with the host's GEMM for the logits.

vLLM pads their weights below the vocabulary; the checkpoint has no such rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from vllm_duck.models.cpu.linear import apply_linear, pack_linear
from vllm_duck.models.cpu.threads import Handle


class Embedding(VocabParallelEmbedding):
    """`models.backend.Embedding`."""

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.vocab_size = vocab_size

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight.data[: self.vocab_size]

    def finish_loading(self) -> None:
        """Nothing: rows are looked up as they are."""


class LmHead(ParallelLMHead):
    """`models.backend.Head`; keeps `weight` beside the packed copy."""

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.packed: Handle

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, H] bf16 -> [T, V] fp32, as accumulated."""
        return apply_linear(
            self.packed, hidden, self.hidden_size, self.vocab_size, dtype=torch.float32
        )

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight.data[: self.vocab_size]

    def finish_loading(self) -> None:
        self.packed = pack_linear(self.weight[: self.vocab_size])
