"""Checks what a kernel is given, and starts it."""

from typing import Any

import torch
from torch import Tensor

from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cuda.kernels.tiles import Tile

# Compiled kernels load 16 bytes at once.
_ALIGNMENT = 16


def start(
    kernel: Any, grid: tuple[int, ...], *args: object, tile: Tile, **constants: object
) -> None:
    """Enqueue a kernel.

    No product is fused with an addition unless by an MMA: Triton's default differs by
    version, and bits with it.
    """
    options: dict[str, object] = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": False,
    }
    enqueue(kernel, grid, args, constants, options)


def enqueue(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[object, ...],
    constants: dict[str, object],
    options: dict[str, object],
) -> None:
    """Where every kernel is called: who only compiles them replaces this."""
    kernel[grid](*args, **constants, **options)


def require(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype
) -> None:
    """None in the shape: any size.

    Raises:
        DuckShapeError: another shape or dtype; not contiguous, or not aligned.
    """
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, sizes, strict=True)
    )
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise DuckShapeError(
            f"{name} must be [{wanted}] {dtype}, contiguous, got {list(sizes)} "
            f"{tensor.dtype}, strides {tensor.stride()}"
        )
    require_aligned(name, tensor)


def require_rows(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As `require`, of a tensor that may be a part of wider rows.

    Raises:
        DuckShapeError: as of `require`, but that only the last axis has to be dense.
    """
    dense = tensor.dim() > 0 and tensor.stride(-1) == 1
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not dense:
        raise DuckShapeError(
            f"{name} must be {list(shape)} {dtype} with dense rows, got "
            f"{list(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        )
    require_aligned(name, tensor)


def require_aligned(name: str, tensor: Tensor) -> None:
    """
    Raises:
        DuckShapeError: it begins elsewhere than at 16 bytes.
    """
    if tensor.data_ptr() % _ALIGNMENT:
        raise DuckShapeError(
            f"{name} must begin at a multiple of {_ALIGNMENT} bytes, got "
            f"{tensor.data_ptr() % _ALIGNMENT} bytes behind one"
        )


def require_power_of_two(name: str, size: int) -> None:
    """
    Raises:
        DuckShapeError: it is none.
    """
    if size < 1 or size & (size - 1):
        raise DuckShapeError(f"{name} must be a power of two, got {size}")
