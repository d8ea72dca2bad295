"""What the C++ host makes of one row, as tests of kernels compare it."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from testing import compiled

_SOURCE = Path(__file__).with_name("cpp_host.cpp")


@dataclass(frozen=True)
class SplitRow:
    """One row of the down projection, split."""

    latent: Tensor
    index: Tensor
    low_query: Tensor
    index_weights: Tensor


def split_row(
    down: Tensor,
    head_weights: Tensor,
    rotation: Tensor,
    norms: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    eps: float,
    index_eps: float,
    index_scale: float,
) -> SplitRow:
    """down [Q + L + R + D], head_weights [I], rotation [R], norms of q, kv, index and
    the index bias; all fp32."""
    q, latent, dim = (len(norm) for norm in norms[:3])
    rope, heads = len(rotation), len(head_weights)
    out = SplitRow(
        latent=torch.empty(latent + latent // 32 + 2 * rope, dtype=torch.uint8),
        index=torch.empty(dim + 4, dtype=torch.uint8),
        low_query=torch.empty(q, dtype=torch.uint16),
        index_weights=torch.empty(heads),
    )
    projected = torch.cat([down, head_weights])
    pointers = (ctypes.c_void_p * 4)(*(norm.data_ptr() for norm in norms))
    _library().split_down(
        _ints(q, latent, rope, dim, heads),
        _memory(projected),
        _memory(rotation),
        pointers,
        ctypes.c_float(eps),
        ctypes.c_float(index_eps),
        ctypes.c_float(index_scale),
        _memory(out.latent),
        _memory(out.index),
        _memory(out.low_query),
        _memory(out.index_weights),
    )
    return out


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    *,
    top: int,
    groups: int,
    top_groups: int,
    normalised: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """logits [E] fp32 -> ids [top] int32, weights [top] fp32."""
    ids, weights = torch.empty(top, dtype=torch.int32), torch.empty(top)
    _library().choose(
        _ints(len(logits), top, groups, top_groups, int(normalised)),
        ctypes.c_float(factor),
        _memory(bias),
        _memory(logits),
        _memory(ids),
        _memory(weights),
    )
    return ids, weights


def _library() -> ctypes.CDLL:
    return compiled.load(_SOURCE)


def _memory(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _ints(*values: int) -> ctypes.c_void_p:
    return np.array(values, np.int32).ctypes.data_as(ctypes.c_void_p)
