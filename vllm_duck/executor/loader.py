"""Loads one shard of the routed experts from a checkpoint into the kernel's weights.

Invariant, pinned by a test: a byte of an expert or column that the shard does not own
is never used, whatever it is.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.checkpoint import Checkpoint, TensorPlace
from vllm_duck.executor.duck import ModelSummary, Shard
from vllm_duck.executor.kernel import BLOCK, LayerWeights
from vllm_duck.executor.tensor_reader import TensorReader

# Reading waits for the disk and packing for the CPU: a few threads keep both busy.
_NUM_LOAD_THREADS = 4

_WEIGHT_DTYPES = {"e4m3-block128": "F8_E4M3", "bf16": "BF16"}
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class LoadedShard:
    """The experts of one shard, ready for the kernel."""

    shard: Shard
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
    rows: slice
    columns: slice


def load_shard(
    checkpoint: Checkpoint, shard: Shard, *, show_progress: bool = True
) -> LoadedShard:
    """Read what the shard owns of every MoE layer, and nothing else.

    Every tensor is checked before the first is read: a checkpoint that lacks one of a
    hundred thousand says so at once, not after an hour.

    Raises:
        DuckConfigError: the shard reaches beyond the model.
        DuckCheckpointError: a tensor is missing, has the wrong shape or dtype, or its
            file is truncated.
        DuckShapeError: the kernel cannot use such a column range.
    """
    start_s = time.monotonic()
    model = checkpoint.summary
    _check_shard(shard, model)
    experts = list(_expert_tiles(checkpoint, shard, model))
    layers = {layer_idx: _allocate(shard, model) for layer_idx in model.layer_ids}
    progress = tqdm(
        desc=f"Loading {shard}",
        total=sum(weights.weight_bytes for weights in layers.values()),
        unit="B",
        unit_scale=True,
        # None: only on a terminal.
        disable=None if show_progress else True,
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
                    progress.update(num_bytes)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        num_bytes_read = reader.num_bytes_read
    return LoadedShard(shard, layers, num_bytes_read, time.monotonic() - start_s)


def shard_bytes(model: ModelSummary, shard: Shard) -> int:
    """Bytes of weights and scales that a duck with this shard reads and holds."""
    return len(model.layer_ids) * _allocate(shard, model).weight_bytes


def _expert_tiles(
    checkpoint: Checkpoint, shard: Shard, model: ModelSummary
) -> Iterator[tuple[int, int, dict[str, _Tile]]]:
    for layer_idx in model.layer_ids:
        for expert_id in range(shard.expert_lo, shard.expert_hi):
            prefix = f"model.layers.{layer_idx}.mlp.experts.{expert_id}"
            tiles = {}
            for projection in _PROJECTIONS:
                name = f"{prefix}.{projection}_proj.weight"
                tiles[projection] = _weight_tile(checkpoint, name, projection, shard)
                if model.weight_format == "e4m3-block128":
                    tiles[f"{projection}_scale"] = _scale_tile(
                        checkpoint, f"{name}_scale_inv", projection, shard
                    )
            yield layer_idx, expert_id, tiles


def _weight_tile(
    checkpoint: Checkpoint, name: str, projection: str, shard: Shard
) -> _Tile:
    return _tile(
        checkpoint,
        name,
        projection,
        dtype=_WEIGHT_DTYPES[checkpoint.weight_format],
        num_columns=checkpoint.moe_intermediate_size,
        num_hidden=checkpoint.hidden_size,
        owned=slice(shard.column_lo, shard.column_hi),
    )


def _scale_tile(
    checkpoint: Checkpoint, name: str, projection: str, shard: Shard
) -> _Tile:
    return _tile(
        checkpoint,
        name,
        projection,
        dtype="F32",
        num_columns=-(-checkpoint.moe_intermediate_size // BLOCK),
        num_hidden=-(-checkpoint.hidden_size // BLOCK),
        # A block that the shard touches counts whole.
        owned=slice(shard.column_lo // BLOCK, -(-shard.column_hi // BLOCK)),
    )


def _tile(
    checkpoint: Checkpoint,
    name: str,
    projection: str,
    *,
    dtype: str,
    num_columns: int,
    num_hidden: int,
    owned: slice,
) -> _Tile:
    """The owned columns are rows of gate and up, and columns of down."""
    place = checkpoint.place_of(name)
    hidden = slice(0, num_hidden)
    is_down = projection == "down"
    shape = (num_hidden, num_columns) if is_down else (num_columns, num_hidden)
    _check_tensor(place, dtype, shape)
    rows, columns = (hidden, owned) if is_down else (owned, hidden)
    return _Tile(place, rows, columns)


def _check_tensor(place: TensorPlace, dtype: str, shape: tuple[int, int]) -> None:
    if place.dtype != dtype:
        raise DuckCheckpointError(
            f"{place.path}: {place.name} must be {dtype} by config.json, "
            f"got {place.dtype}"
        )
    if place.shape != shape:
        raise DuckCheckpointError(
            f"{place.path}: {place.name} must have shape {list(shape)} by config.json, "
            f"got {list(place.shape)}"
        )


def _check_shard(shard: Shard, model: ModelSummary) -> None:
    whole = Shard(0, model.moe_intermediate_size, 0, model.n_routed_experts)
    has_columns = 0 <= shard.column_lo < shard.column_hi <= whole.column_hi
    has_experts = 0 <= shard.expert_lo < shard.expert_hi <= whole.expert_hi
    if not (has_columns and has_experts):
        raise DuckConfigError(f"a shard must lie in {whole}, got {shard}")


def _allocate(shard: Shard, model: ModelSummary) -> LayerWeights:
    return LayerWeights.allocate(
        shard_num_experts=shard.num_experts,
        hidden_size=model.hidden_size,
        num_columns=shard.num_columns,
        column_offset=shard.column_lo % BLOCK,
        weight_format=model.weight_format,
    )


def _load_expert(
    weights: LayerWeights,
    expert_idx: int,
    tiles: dict[str, _Tile],
    reader: TensorReader,
) -> int:
    arrays = {
        name: reader.read(tile.place, tile.rows, tile.columns)
        for name, tile in tiles.items()
    }
    try:
        weights.load_expert(expert_idx, **arrays)
    except DuckCheckpointError as error:
        place = tiles["gate"].place
        raise DuckCheckpointError(f"{place.path}: {place.name}: {error}") from error
    return sum(array.nbytes for array in arrays.values())
