"""The LM head: vLLM's module, with the host's GEMM for the logits."""

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_duck.models.cpu.linear import apply_linear, pack_linear
from vllm_duck.models.cpu.threads import Handle
from vllm_duck.models.packing import HostModule


class LmHead(ParallelLMHead, HostModule):
    """Keeps `weight` beside the packed copy: vLLM compares it with a draft's."""

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

    def finish_loading(self) -> None:
        self.packed = pack_linear(self.weight[: self.vocab_size])
