"""The MoE layer of the host: router, shared expert, and the proxy to the ducks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_duck.executor.duck import MoeRequest
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.linear import Mlp


class PendingSum(Protocol):
    """Calls to every duck, in flight."""

    def result(self) -> npt.NDArray[np.float32]:
        """Wait; returns the ducks' partial sums added up, [T, H] float32."""
        ...


class Ducks(Protocol):
    """All ducks as one executor."""

    def start(self, request: MoeRequest) -> PendingSum: ...


class Router(nn.Module):
    """Chooses each token's experts; fp32 throughout.

    Sigmoid scores plus a bias choose: first the groups, by the sum of their best two,
    then the experts of those groups. The scores without the bias weigh.
    Source: DeepSeek-V3 report, 2.1.2 and 3.2.2; inference/model.py::Gate.
    """

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        self.weight = nn.Parameter(
            torch.empty(dims.n_routed_experts, dims.hidden_size, dtype=torch.float32),
            requires_grad=False,
        )
        self.bias = nn.Parameter(
            torch.empty(dims.n_routed_experts, dtype=torch.float32),
            requires_grad=False,
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, H] -> ids [T, K] int32, weights [T, K] fp32."""
        dims = self.dims
        scores = F.linear(hidden.float(), self.weight).sigmoid()
        biased = (scores + self.bias).unflatten(-1, (dims.n_group, -1))
        if dims.topk_group < dims.n_group:
            group_scores = biased.topk(2, dim=-1).values.sum(-1)
            best = group_scores.topk(dims.topk_group, dim=-1, sorted=False).indices
            is_left_out = torch.ones_like(group_scores, dtype=torch.bool)
            is_left_out.scatter_(1, best, False)
            biased = biased.masked_fill(is_left_out.unsqueeze(-1), float("-inf"))
        ids = biased.flatten(1).topk(dims.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, ids)
        if dims.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids.to(torch.int32), weights * dims.routed_scaling_factor

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight.data
        yield f"{prefix}.e_score_correction_bias", self.bias.data


@dataclass(frozen=True)
class PendingMoe:
    """An MoE layer whose routed part is at the ducks; the shared part is done."""

    shared: Tensor
    routed: PendingSum

    def result(self) -> Tensor:
        """Wait for the ducks; returns [T, H] in the dtype of the shared part."""
        routed = torch.from_numpy(self.routed.result()).to(self.shared.device)
        return routed.add_(self.shared).to(self.shared.dtype)


class RemoteMoe(nn.Module):
    """Router and shared expert here, routed experts at the ducks."""

    def __init__(self, dims: Dimensions, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.router = Router(dims)
        self.shared = Mlp(
            dims.hidden_size, dims.moe_intermediate_size * dims.n_shared_experts
        )
        # The worker hands the ducks over before the first forward.
        self.ducks: Ducks

    def start(self, hidden: Tensor) -> PendingMoe:
        """hidden [T, H] bf16: send it to the ducks, then run the shared expert."""
        ids, weights = self.router(hidden)
        routed = self.ducks.start(
            MoeRequest(
                layer_idx=self.layer_idx,
                hidden=_bf16_bits(hidden),
                topk_ids=ids.cpu().numpy(),
                topk_weights=weights.cpu().numpy(),
            )
        )
        return PendingMoe(self.shared(hidden), routed)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.router.checkpoint_views(f"{prefix}.gate")
        yield from self.shared.checkpoint_views(f"{prefix}.shared_experts")


def _bf16_bits(hidden: Tensor) -> npt.NDArray[np.uint16]:
    return hidden.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
