"""Weights in fewer bits than the checkpoint has, for ducks with less RAM.

A group is 128 (int8) or 32 (int4) neighbouring weights along the dot product of one
output, counted from the model's first; a shard's edge cuts it. A weight w becomes
code * scale, scale in bf16:

    format         bits  code     scale               |w - code * scale| is at most
    int8-group128  8.1   -127..   largest / 127       0.501 scale
    int4-group32   4.5   -8..7    -largest / 8        0.501 scale, but 1.04 scale where
                                                      it is near -largest

`largest` is the group's weight of the largest magnitude, with its sign for int4. For
normally distributed weights that is 0.65 % and 8.6 % of their root mean square; fp8
itself is 2.6 % from the bf16 it was made of.

Invariant, pinned by a test: the result has the same bits on every machine, whether a
split or a loading duck makes it.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor import _kernel
from vllm_duck.executor.compute.kernel import (
    GROUP_SIZES,
    WEIGHT_FORMATS,
    LayerWeights,
    num_groups,
)

Array: TypeAlias = npt.NDArray[Any]


def load_expert(
    weights: LayerWeights, expert_idx: int, arrays: Mapping[str, Array]
) -> None:
    """Pack one expert, re-quantised if `weights` want another format than it has.

    Raises:
        DuckCheckpointError: a weight or scale is not finite; names the tensor.
    """
    # e4m3 and bf16 of a checkpoint; a re-quantised split has codes with bf16 scales.
    is_requantized = "gate_scale" in arrays and arrays["gate_scale"].dtype == np.uint16
    if weights.weight_format in GROUP_SIZES and not is_requantized:
        arrays = requantize_expert(
            arrays,
            column_offset=weights.column_offset,
            weight_format=weights.weight_format,
        )
    weights.load_expert(expert_idx, **arrays)


def requantize_expert(
    arrays: Mapping[str, Array], *, column_offset: int, weight_format: str
) -> dict[str, Array]:
    """Turn load_expert's arrays of an e4m3 or bf16 expert into those of another format.

    Shapes: I columns of the shard, H hidden size, G = num_groups along the row.
        gate, up, gate_scale, up_scale  [I, H] codes, [I, G] scales
        down, down_scale                [H, I] codes, [H, G] scales
    int8 codes are their bits (uint8); int4 codes are two in a byte (so half as many),
    the even one in the lower half. Scales are bf16 bits (uint16).

    Raises:
        DuckCheckpointError: a weight is not finite; names its tensor.
    """
    made: dict[str, Array] = {}
    for key in ("gate", "up", "down"):
        weight, scale = arrays[key], arrays.get(f"{key}_scale")
        is_down = key == "down"
        codes, scales = _quantize(
            weight,
            scale,
            row_offset=0 if is_down else column_offset,
            k_offset=column_offset if is_down else 0,
            weight_format=weight_format,
        )
        if codes is None:
            raise DuckCheckpointError(
                f"{key}_proj must be finite to become {weight_format}, and is not; the "
                "checkpoint or its copy is damaged"
            )
        made[key], made[f"{key}_scale"] = codes, scales
    return made


def _quantize(
    weight: Array,
    scale: Array | None,
    *,
    row_offset: int,
    k_offset: int,
    weight_format: str,
) -> tuple[npt.NDArray[np.uint8] | None, npt.NDArray[np.uint16]]:
    num_rows, num_k = weight.shape
    is_int4 = weight_format == "int4-group32"
    codes = np.empty((num_rows, num_k // 2 if is_int4 else num_k), np.uint8)
    groups = num_groups(k_offset, num_k, GROUP_SIZES[weight_format])
    scales = np.empty((num_rows, groups), np.uint16)
    is_finite = _kernel.quantize(
        weight,
        scale,
        row_offset=row_offset,
        k_offset=k_offset,
        format=WEIGHT_FORMATS.index(weight_format),
        codes=codes,
        scales=scales,
    )
    return codes if is_finite else None, scales
