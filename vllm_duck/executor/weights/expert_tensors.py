"""An expert's tensors by name and shape, and the part of each that a shard owns."""

from dataclasses import dataclass

from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.compute.kernel import BLOCK, GROUP_SIZES, LayerWeights
from vllm_duck.executor.duck import ModelSummary, Shard
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.headers import TensorPlace

_WEIGHT_DTYPES = {
    "e4m3-block128": "F8_E4M3",
    "bf16": "BF16",
    "int8-group128": "I8",
    "int4-group32": "U8",
}
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Rectangle:
    """The rows and columns of a 2-d tensor that somebody owns."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return (
            self.rows.stop - self.rows.start,
            self.columns.stop - self.columns.start,
        )


@dataclass(frozen=True)
class ExpertTensor:
    """One of an expert's tensors: gate, up, down, or the scales of one of them."""

    # The argument of LayerWeights.load_expert.
    key: str
    # The end of its name: "weight", "weight_scale_inv" or "weight_scale".
    suffix: str
    # As safetensors spells it.
    dtype: str
    # Of the whole model's tensor.
    shape: tuple[int, int]
    # Weights that an element stands for, along either axis.
    step: tuple[int, int]

    @property
    def projection(self) -> str:
        """ "gate", "up" or "down"."""
        return self.key.removesuffix("_scale")

    def owned(self, shard: Shard) -> Rectangle:
        """The shard's columns are rows of gate and up, and columns of down; a scale
        that they touch counts whole."""
        axis = 1 if self.key.startswith("down") else 0
        step = self.step[axis]
        own = slice(shard.column_lo // step, -(-shard.column_hi // step))
        if axis == 1:
            return Rectangle(slice(0, self.shape[0]), own)
        return Rectangle(own, slice(0, self.shape[1]))

    def find(
        self, checkpoint: Checkpoint, layer_idx: int, expert_id: int
    ) -> TensorPlace:
        """Where the whole tensor is.

        Raises:
            DuckCheckpointError: it is missing, has the wrong shape or dtype, or its
                file is truncated.
        """
        names = checkpoint.family.tensors
        name = names.expert(layer_idx, expert_id, self.projection)
        place = checkpoint.place_of(f"{name}.{self.suffix}")
        if place.dtype != self.dtype:
            raise DuckCheckpointError(
                f"{place.path}: {place.name} must be {self.dtype} by config.json, "
                f"got {place.dtype}"
            )
        if place.shape != self.shape:
            raise DuckCheckpointError(
                f"{place.path}: {place.name} must have shape {list(self.shape)} by "
                f"config.json, got {list(place.shape)}"
            )
        return place


def expert_tensors(model: ModelSummary) -> tuple[ExpertTensor, ...]:
    """All tensors of one expert, weights first."""
    weight_format = model.weight_format
    codes_a_byte = 2 if weight_format == "int4-group32" else 1
    dtype = _WEIGHT_DTYPES[weight_format]
    weights = _three(model, "", "weight", dtype, (1, codes_a_byte))
    if weight_format == "bf16":
        return weights
    if weight_format in GROUP_SIZES:
        step = 1, GROUP_SIZES[weight_format]
        return weights + _three(model, "_scale", "weight_scale", "BF16", step)
    step = BLOCK, BLOCK
    return weights + _three(model, "_scale", "weight_scale_inv", "F32", step)


def check_shard(shard: Shard, model: ModelSummary) -> None:
    """Make sure that the model has what the shard names.

    Raises:
        DuckConfigError: the shard is empty or reaches beyond the model.
    """
    whole = Shard(0, model.moe_intermediate_size, 0, model.n_routed_experts)
    has_columns = 0 <= shard.column_lo < shard.column_hi <= whole.column_hi
    has_experts = 0 <= shard.expert_lo < shard.expert_hi <= whole.expert_hi
    if not (has_columns and has_experts):
        raise DuckConfigError(f"a shard must lie in {whole}, got {shard}")


def allocate_layer(shard: Shard, model: ModelSummary) -> LayerWeights:
    """Reserve the kernel's memory for the shard's part of one layer.

    Raises:
        DuckShapeError: the kernel cannot use such a column range.
    """
    return LayerWeights(
        num_experts=shard.num_experts,
        hidden_size=model.hidden_size,
        num_columns=shard.num_columns,
        column_offset=shard.column_lo % BLOCK,
        weight_format=model.weight_format,
    )


def _three(
    model: ModelSummary, key_end: str, suffix: str, dtype: str, step: tuple[int, int]
) -> tuple[ExpertTensor, ...]:
    tensors = []
    for projection in _PROJECTIONS:
        rows, columns = model.moe_intermediate_size, model.hidden_size
        if projection == "down":
            rows, columns = columns, rows
        shape = -(-rows // step[0]), -(-columns // step[1])
        tensors.append(ExpertTensor(projection + key_end, suffix, dtype, shape, step))
    return tuple(tensors)
