"""What fits on a GPU: the host's weights, and as many tokens as the rest holds."""

from dataclasses import dataclass

from vllm_duck.errors import DuckConfigError
from vllm_duck.plan.sizes import Sizes

# Of the card, what a desktop and other allocations leave; the CUDA context.
_USABLE, _CONTEXT_BYTES = 0.95, 0.6e9
# Scores and attention in panels of rows, lane slots, graphs.
_WORKSPACE_BYTES = 0.9e9
_LEAST_TOKENS = 4096


@dataclass(frozen=True)
class CardMemory:
    """Bytes on a GPU, and of pinned memory beside it."""

    usable_bytes: float
    weight_bytes: float
    workspace_bytes: float
    kv_bytes_per_token: int
    # The embedding, and what host and card exchange.
    pinned_bytes: float

    @property
    def num_tokens(self) -> int:
        """That the caches hold."""
        left = self.usable_bytes - self.weight_bytes - self.workspace_bytes
        return max(0, int(left / self.kv_bytes_per_token))


def card_memory(sizes: Sizes, card_gib: float) -> CardMemory:
    """With weights as in the checkpoint, and the embedding in the host's memory."""
    weights = sizes.host_bytes(sizes.weight_bytes) + sizes.vocabulary_bytes
    return CardMemory(
        usable_bytes=card_gib * 2**30 * _USABLE - _CONTEXT_BYTES,
        weight_bytes=weights,
        workspace_bytes=_WORKSPACE_BYTES,
        kv_bytes_per_token=sizes.kv_bytes,
        pinned_bytes=sizes.vocabulary_bytes,
    )


def check_card(memory: CardMemory, name: str) -> None:
    """Refuse a card that is too small.

    Raises:
        DuckConfigError: fewer than 4,096 tokens would fit.
    """
    if memory.num_tokens < _LEAST_TOKENS:
        needed = memory.weight_bytes + memory.workspace_bytes
        needed += _LEAST_TOKENS * memory.kv_bytes_per_token
        raise DuckConfigError(
            f"{name} has {memory.usable_bytes / 1e9:.1f} GB for weights and caches; "
            f"{_LEAST_TOKENS:,} tokens need {needed / 1e9:.1f}: give a larger --host, "
            "or --host-gbs of a CPU"
        )
