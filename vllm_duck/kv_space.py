"""How large the KV caches are where the user says nothing.

vLLM wants 92 % of a CPU's memory to be free for itself then, and would leave none for
local ducks. Here the caches get what the requests could use at once, within a share of
what weights and processes leave.
"""

from dataclasses import dataclass
from math import prod

from vllm.config import CacheConfig, VllmConfig
from vllm.logger import init_logger
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import (
    get_allowed_cpu_list,
    get_cgroup_memory_limit,
    get_memory_node_info,
    get_visible_memory_node,
)

from vllm_duck.config import DuckConfig, HandOver
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.duck import REQUANTIZED_FORMATS
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_format import IndexFormat, LatentFormat

# The rest is for scratch and for the page cache.
_SHARE = 0.8
# What vLLM's engine, its worker and two ducks take before they hold any weight.
_PROCESS_BYTES = 1_200_000_000
_FLAG = "--kv-cache-memory-bytes"
# Scales included.
_BITS_PER_WEIGHT = {
    "e4m3-block128": 8.002,
    "bf16": 16,
    "int8-group128": 8.125,
    "int4-group32": 4.5,
}

logger = init_logger(__name__)


@dataclass(frozen=True)
class Memory:
    """Bytes: what is available, and the weights that will take of it."""

    # On the NUMA node of the host's process, and in all: ducks are on every node.
    node: int
    total: int
    host_weights: int
    # 0 where the ducks are on machines of their own.
    duck_weights: int

    @property
    def left(self) -> int:
        """For the caches, which are on the host's node."""
        everywhere = self.total - self.host_weights - self.duck_weights
        ducks_here = self.duck_weights * self.node // max(1, self.node, self.total)
        here = self.node - self.host_weights - ducks_here
        return min(here, everywhere) - _PROCESS_BYTES


@dataclass(frozen=True)
class Demand:
    """What the caches hold at most: requests of the longest length, in whole blocks."""

    num_requests: int
    # Tokens, those of unconfirmed drafts included.
    request_len: int
    block_len: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.block_len * self.token_bytes

    def num_bytes(self, num_requests: int) -> int:
        blocks = num_requests * -(-self.request_len // self.block_len)
        # One block is vLLM's own and holds no tokens.
        return (blocks + 1) * self.block_bytes


def set_default(vllm_config: VllmConfig) -> None:
    """Give the caches a size, unless the user has chosen one in any way.

    Raises:
        DuckConfigError: there is no room for one request of max_model_len.
    """
    cache = vllm_config.cache_config
    # VLLM_CPU_KVCACHE_SPACE has become the former by now.
    is_chosen = cache.kv_cache_memory_bytes is not None
    if is_chosen or cache.gpu_memory_utilization != CacheConfig.gpu_memory_utilization:
        return
    memory, demand = _memory(vllm_config), _demand(vllm_config)
    is_fitted = vllm_config.model_config.original_max_model_len == -1
    cache.kv_cache_memory_bytes = choose(memory, demand, is_fitted=is_fitted)
    is_whole = cache.kv_cache_memory_bytes == demand.num_bytes(demand.num_requests)
    logger.info(
        "KV caches: %s for %s tokens, %s; %s sets another size",
        _size(cache.kv_cache_memory_bytes),
        f"{cache.kv_cache_memory_bytes // demand.token_bytes:,}",
        f"as {demand.num_requests} requests of {demand.request_len:,} could use"
        if is_whole
        else f"{_SHARE} of what the weights leave of {_size(memory.total)}",
        _FLAG,
    )


def choose(memory: Memory, demand: Demand, *, is_fitted: bool = False) -> int:
    """The bytes of all caches.

    is_fitted: max_model_len is "auto": vLLM shortens it to what there is room for.

    Raises:
        DuckConfigError: there is no room for one request of max_model_len.
    """
    blocks = int(_SHARE * memory.left) // demand.block_bytes
    room = max(0, blocks) * demand.block_bytes
    least = demand.num_bytes(1)
    if room == 0 or (room < least and not is_fitted):
        advice = f"lower --max-model-len, or set {_FLAG} yourself"
        if room == 0:
            advice = f"free memory, or set {_FLAG} yourself if there is more than that"
        raise DuckConfigError(
            f"one request of {demand.request_len:,} tokens needs {_size(least)} of KV "
            f"cache, and there is room for {_size(room)}: {_shares(memory)}; {advice}"
        )
    return min(demand.num_bytes(demand.num_requests), room)


def _shares(memory: Memory) -> str:
    return (
        f"of {_size(memory.total)} of available memory ({_size(memory.node)} on the "
        f"host's NUMA node) the host's weights take {_size(memory.host_weights)}, "
        f"local ducks {_size(memory.duck_weights)} and vLLM's processes "
        f"{_size(_PROCESS_BYTES)}, and {_SHARE} of the rest may be used"
    )


def _demand(vllm_config: VllmConfig) -> Demand:
    dims = Dimensions.from_hf_config(vllm_config.model_config.hf_config)
    kv_dtype = HandOver.of(vllm_config).kv_dtype
    latent = LatentFormat(dims.kv_lora_rank, dims.qk_rope_head_dim, kv_dtype)
    index = IndexFormat(dims.index_head_dim, kv_dtype)
    drafter = vllm_config.speculative_config
    num_layers = dims.num_hidden_layers + (drafter is not None)
    num_indexed = sum(layer_idx < num_layers for layer_idx in dims.index_layer_ids)
    num_drafts = 0 if drafter is None else drafter.num_speculative_tokens
    return Demand(
        num_requests=vllm_config.scheduler_config.max_num_seqs,
        request_len=vllm_config.model_config.max_model_len + num_drafts,
        block_len=vllm_config.cache_config.block_size,
        token_bytes=num_layers * latent.token_bytes + num_indexed * index.token_bytes,
    )


def _memory(vllm_config: VllmConfig) -> Memory:
    checkpoint = Checkpoint(vllm_config.model_config.model)
    config = DuckConfig.of(vllm_config)
    nodes = get_visible_memory_node()
    total = sum(get_memory_node_info(node).available_memory for node in nodes)
    limit = get_cgroup_memory_limit()
    if limit is not None:
        # By its module: a hook counts the page cache as free there.
        usage = cpu_resource_utils.get_cgroup_memory_usage()
        total = min(total, limit - (usage or 0))
    own_node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    return Memory(
        node=own_node.available_memory,
        total=total,
        host_weights=host_weight_bytes(checkpoint),
        duck_weights=0
        if config.endpoints
        else duck_weight_bytes(checkpoint, config.local_weight_format),
    )


def host_weight_bytes(checkpoint: Checkpoint) -> int:
    """All but the routed experts, as the checkpoint has them.

    Raises:
        DuckCheckpointError: a file is missing or truncated.
    """
    total = 0
    for name in checkpoint.tensor_names:
        if not checkpoint.family.tensors.is_expert(name):
            place = checkpoint.place_of(name)
            total += place.end - place.begin
    return total


def duck_weight_bytes(checkpoint: Checkpoint, requantized: str | None) -> int:
    """The routed experts, in all ducks together."""
    weight_format = checkpoint.weight_format
    if requantized is not None:
        weight_format = REQUANTIZED_FORMATS[requantized]
    num_weights = (
        *(len(checkpoint.moe_layer_ids), checkpoint.n_routed_experts, 3),
        *(checkpoint.hidden_size, checkpoint.moe_intermediate_size),
    )
    return int(prod(num_weights) * _BITS_PER_WEIGHT[weight_format] / 8)


def _size(num_bytes: int) -> str:
    if num_bytes < 10**9:
        return f"{num_bytes / 1e6:,.0f} MB"
    return f"{num_bytes / 1e9:,.1f} GB"
