"""The bytes of one token in the two paged caches.

    latent, fp8:  [512 e4m3 | 4 fp32 scales, one per 128 | 64 bf16 rope]   656 bytes
    latent, bf16: [512 bf16 | 64 bf16 rope]                              1,152 bytes
    index, fp8:   [128 e4m3 | 1 fp32 scale]                                132 bytes
    index, bf16:  [128 bf16]                                               256 bytes

for kv_lora_rank 512, qk_rope_head_dim 64 and index_head_dim 128. A cached value is
the scale times the e4m3 number; scale = max |x| / 448 over its tile.
Source: the layout is vLLM's "fp8_ds_mla" (DeepSeek-V3.2, FlashMLA). The kernels write
and read it: csrc/host/kernels/cache_rows.h.
"""

from dataclasses import dataclass
from typing import Literal

from vllm_duck.errors import DuckConfigError

KvDtype = Literal["fp8", "bf16"]

TILE = 128


@dataclass(frozen=True)
class LatentFormat:
    """One token of the MLA cache: latent [L] and rotated key [R].

    Raises:
        DuckConfigError: fp8, and L is no multiple of 128.
    """

    latent_dim: int
    rope_dim: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        if self.dtype == "fp8" and self.latent_dim % TILE:
            _refuse("kv_lora_rank", f"a multiple of {TILE}", self.latent_dim)

    @property
    def token_bytes(self) -> int:
        if self.dtype == "bf16":
            return 2 * (self.latent_dim + self.rope_dim)
        return self.latent_dim + 4 * (self.latent_dim // TILE) + 2 * self.rope_dim


@dataclass(frozen=True)
class IndexFormat:
    """One token of the indexer's cache: its key [D], in fp8 with one scale.

    Raises:
        DuckConfigError: fp8, and D is not 128.
    """

    index_dim: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        if self.dtype == "fp8" and self.index_dim != TILE:
            _refuse("index_head_dim", str(TILE), self.index_dim)

    @property
    def token_bytes(self) -> int:
        if self.dtype == "bf16":
            return 2 * self.index_dim
        return self.index_dim + 4


def _refuse(name: str, expected: str, got: int) -> None:
    raise DuckConfigError(
        f"config.json: {name} must be {expected} with fp8 KV caches, got {got}; "
        f"set --kv-cache-dtype bfloat16"
    )
