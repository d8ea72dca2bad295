"""The arithmetic of speculative sampling: accept a draft, or draw from what is left.

p is the target's distribution, q the one that the draft was drawn from.
Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding".
"""

import torch
from torch import Tensor


def accepts(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether u * q <= p, for drafts that the target can produce at all.

    Shapes: B drafts. u [B] in [0, 1); p, q [B], the draft's probability in each.
    A draft with p = 0 is rejected even at u = 0.
    """
    return (u * q <= p) & (p > 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), normalised: what a rejected draft is replaced from.

    Shapes: p, q [B, V] fp32, rows sum to 1. Where p and q agree up to rounding nothing
    is left, and p itself is returned.
    """
    left = (p - q).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=1e-38), p)


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """sum_y min(p, q), [B]: the chance that a draft from q is accepted."""
    return torch.minimum(p, q).sum(-1)
