"""Loads one shard of the routed experts from a checkpoint into the kernel's weights.

Invariant, pinned by a test: a byte of an expert or column that the shard does not own
is never used, whatever it is.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.compute.kernel import LayerWeights
from vllm_duck.executor.compute.requantize import load_expert
from vllm_duck.executor.duck import ModelSummary, Shard
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.expert_tensors import (
    Rectangle,
    allocate_layer,
    check_shard,
    expert_tensors,
)
from vllm_duck.executor.weights.headers import TensorPlace
from vllm_duck.executor.weights.progress import ByteProgress
from vllm_duck.executor.weights.tensor_reader import TensorReader

# Reading waits for the disk and packing for the CPU: a few threads keep both busy.
_NUM_LOAD_THREADS = 4


# Decides where a layer's memory is before weights are written to it.
Place: TypeAlias = Callable[[LayerWeights], None]


def leave_in_place(weights: LayerWeights) -> None:
    """Leave the memory where the thread runs that loads it."""


@dataclass(frozen=True)
class LoadedShard:
    """The experts of one shard, ready for the kernel."""

    shard: Shard
    # With the weight format that they have in memory.
    model: ModelSummary
    layers: dict[int, LayerWeights]
    num_bytes_read: int
    seconds: float

    @property
    def weight_bytes(self) -> int:
        return sum(weights.weight_bytes for weights in self.layers.values())


@dataclass(frozen=True)
class _Tile:
    """The part of one tensor that the shard owns."""

    place: TensorPlace
    owned: Rectangle


def load_shard(
    checkpoint: Checkpoint,
    shard: Shard,
    *,
    weight_format: str | None = None,
    place: Place = leave_in_place,
    show_progress: bool = True,
) -> LoadedShard:
    """Read what the shard owns of every MoE layer, and nothing else.

    weight_format: "int8" or "int4" to hold the experts in fewer bits.
    place: MoeKernel.place of the kernel that will use them.

    Every tensor is checked before the first is read: a checkpoint that lacks one of a
    hundred thousand says so at once, not after an hour.

    Raises:
        DuckConfigError: the shard reaches beyond the model.
        DuckCheckpointError: a tensor is missing, has the wrong shape or dtype, or its
            file is truncated.
        DuckShapeError: the kernel cannot use such a column range.
    """
    start_s = time.monotonic()
    source = checkpoint.summary
    model = source.requantized(weight_format)
    check_shard(shard, model)
    experts = list(_expert_tiles(checkpoint, shard, source))
    layers = {layer_idx: allocate_layer(shard, model) for layer_idx in model.layer_ids}
    for weights in layers.values():
        place(weights)
    progress = ByteProgress(
        f"Loading {shard}",
        total_bytes=shard_bytes(source, shard),
        is_shown=show_progress,
    )
    with progress, TensorReader() as reader:

        def load(expert: tuple[int, int, dict[str, _Tile]]) -> int:
            layer_idx, expert_id, tiles = expert
            return _load_expert(
                layers[layer_idx], expert_id - shard.expert_lo, tiles, reader
            )

        with ThreadPoolExecutor(_NUM_LOAD_THREADS, "duck-load") as pool:
            try:
                for num_bytes in pool.map(load, experts):
                    progress.add(num_bytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        num_bytes_read = reader.num_bytes_used
    seconds = time.monotonic() - start_s
    return LoadedShard(shard, model, layers, num_bytes_read, seconds)


def shard_bytes(model: ModelSummary, shard: Shard) -> int:
    """Bytes of weights and scales that a duck with this shard reads and holds."""
    return len(model.layer_ids) * allocate_layer(shard, model).weight_bytes


def _expert_tiles(
    checkpoint: Checkpoint, shard: Shard, model: ModelSummary
) -> Iterator[tuple[int, int, dict[str, _Tile]]]:
    tensors = [(tensor, tensor.owned(shard)) for tensor in expert_tensors(model)]
    for layer_idx in model.layer_ids:
        for expert_id in range(shard.expert_lo, shard.expert_hi):
            yield (
                layer_idx,
                expert_id,
                {
                    tensor.key: _Tile(
                        tensor.find(checkpoint, layer_idx, expert_id), owned
                    )
                    for tensor, owned in tensors
                },
            )


def _load_expert(
    weights: LayerWeights,
    expert_idx: int,
    tiles: dict[str, _Tile],
    reader: TensorReader,
) -> int:
    arrays = {
        name: reader.read(tile.place, tile.owned.rows, tile.owned.columns)
        for name, tile in tiles.items()
    }
    try:
        load_expert(weights, expert_idx, arrays)
    except DuckCheckpointError as error:
        place = tiles["gate"].place
        raise DuckCheckpointError(f"{place.path}: {place.name}: {error}") from error
    return sum(array.nbytes for array in arrays.values())
