"""A weight matrix in the form that the checkpoint has it in."""

import torch
from torch import Tensor

from vllm_duck.errors import DuckCheckpointError

BLOCK = 128
E4M3 = torch.float8_e4m3fn


class Matrix:
    """[out, in], as bf16 or as e4m3 codes with a float32 scale for each 128 x 128.

    A backend's part hands it out among its `checkpoint_views`; the loader puts into it
    what the file has, without a copy, and the part packs that for its kernels.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        self.shape = torch.Size((out_features, in_features))
        # Until `put`.
        self.name = "a weight"
        self.weight = torch.empty(0, in_features, dtype=torch.bfloat16)
        self.scale: Tensor | None = None

    def put(self, name: str, weight: Tensor, scale: Tensor | None) -> None:
        """Take the checkpoint's tensor, and its scales if it is e4m3.

        Raises:
            DuckCheckpointError: wrong shape or dtype; or e4m3 and no scales.
        """
        if weight.shape != self.shape:
            raise DuckCheckpointError(
                f"{name} must have shape {tuple(self.shape)} by config.json, "
                f"got {tuple(weight.shape)}"
            )
        if weight.dtype == E4M3:
            self.scale = check_scale(name, weight, scale).float().contiguous()
        elif weight.dtype in (torch.bfloat16, torch.float32):
            weight = weight.to(torch.bfloat16)
            self.scale = None
        else:
            raise DuckCheckpointError(
                f"{name} must be e4m3, bf16 or fp32, got {weight.dtype}"
            )
        self.name, self.weight = name, weight.contiguous()

    def copy_(self, weight: Tensor) -> None:
        """Take other values, rounded to bf16."""
        self.put(self.name, weight.to(torch.bfloat16), None)

    def values(self) -> Tensor:
        """What it stands for, in fp32."""
        if self.scale is None:
            return self.weight.float()
        return dequantize(self.name, self.weight, self.scale)

    def reorder(self, order: Tensor) -> None:
        """Permute the rows: row i becomes row order[i] of before.

        Raises:
            DuckCheckpointError: rows of e4m3 would leave their scale blocks.
        """
        is_coded = self.scale is not None
        if is_coded and not torch.equal(
            order // BLOCK, torch.arange(len(order)) // BLOCK
        ):
            raise DuckCheckpointError(
                f"rows of an e4m3 matrix are reordered within {BLOCK} rows alone; "
                "index_head_dim must be a multiple of that, or the weights bf16"
            )
        bits = self.weight.view(torch.uint8 if is_coded else torch.int16)
        self.weight = bits[order].view(self.weight.dtype)


def check_scale(name: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """The scales of an e4m3 matrix, [ceil(out/128), ceil(in/128)].

    Raises:
        DuckCheckpointError: there are none, or they have another shape.
    """
    expected = tuple(-(-size // BLOCK) for size in weight.shape)
    got = None if scale is None else tuple(scale.shape)
    if scale is None or got != expected:
        raise DuckCheckpointError(
            f"{name}_scale_inv must have shape {expected}, one scale per "
            f"{BLOCK}x{BLOCK} block, got {got}"
        )
    return scale


def dequantize(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] e4m3 times scale [ceil(out/128), ceil(in/128)] fp32 -> fp32."""
    scale = check_scale(name, weight, scale).float()
    rows = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
