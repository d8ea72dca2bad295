"""The MoE layer of the host: router, shared expert, and the proxy to the ducks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vllm_duck.errors import DuckShapeError
from vllm_duck.executor.duck import Ducks, InFlight, MoeRequest, MoeSum
from vllm_duck.models.backend import LayerOutput
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.linear import Floats, Mlp, weight_parameter
from vllm_duck.models.cpu.packing import HostModule, pack
from vllm_duck.models.cpu.threads import Bits, Handle, current, require_bits
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.matrix import Matrix


class Router(HostModule):
    """Chooses each token's experts; fp32 throughout.

    Sigmoid scores plus a bias choose: first the groups, by the sum of their best two,
    then the experts of those groups; ties go to the lower id. The weights are the
    scores without the bias.
    Source: DeepSeek-V3 report, 2.1.2 and 3.2.2; inference/model.py::Gate.

    Raises:
        DuckConfigError: the family chooses experts by another rule.
    """

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        dims.family.require(router=("noaux_tc",))
        self.dims = dims
        num_experts = dims.n_routed_experts
        self.weight = weight_parameter(
            num_experts, dims.hidden_size, dtype=torch.float32
        )
        self.bias = weight_parameter(num_experts, dtype=torch.float32)
        self.packed: Handle

    def forward(self, hidden: Bits) -> tuple[npt.NDArray[np.int32], Floats]:
        """hidden [T, H] bf16 bits -> ids [T, A], weights [T, A], best expert first.

        Raises:
            DuckShapeError: hidden has another shape, dtype or layout.
        """
        require_bits("hidden", hidden, self.dims.hidden_size)
        shape = (hidden.shape[0], self.dims.num_experts_per_tok)
        ids, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        _host.route(current(), self.packed, hidden.shape[0], hidden, ids, weights)
        return ids, weights

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight.data
        yield f"{prefix}.e_score_correction_bias", self.bias.data

    def finish_loading(self) -> None:
        dims = self.dims
        self.packed = pack(
            _host.router_new,
            weight=self.weight.data_ptr(),
            bias=self.bias.data_ptr(),
            hidden_size=dims.hidden_size,
            n_routed_experts=dims.n_routed_experts,
            num_experts_per_tok=dims.num_experts_per_tok,
            n_group=dims.n_group,
            topk_group=dims.topk_group,
            norm_topk_prob=dims.norm_topk_prob,
            routed_scaling_factor=dims.routed_scaling_factor,
        )
        del self.weight, self.bias


@dataclass(frozen=True)
class PendingMoe:
    """An MoE layer whose routed part is at the ducks; the shared part is done."""

    residual: Bits
    shared: Floats
    routed: InFlight[MoeSum]

    def is_sent(self) -> bool:
        return True

    def is_done(self) -> bool:
        return self.routed.is_done()

    def wait(self) -> LayerOutput:
        """Wait for the ducks; the layer's output is rounded once.

        Raises:
            DuckShapeError: the residual or the ducks' sum has other rows.
        """
        total, times = self.routed.wait()
        routed = np.ascontiguousarray(total, np.float32)
        require_bits("residual", self.residual, self.shared.shape[1])
        if not self.residual.shape == self.shared.shape == routed.shape:
            raise DuckShapeError(
                f"the ducks' sum {routed.shape} and the residual {self.residual.shape} "
                f"must have the shape of the shared part, {self.shared.shape}"
            )
        out = np.empty_like(self.residual)
        _host.add(current(), out.size, self.residual, self.shared, routed, out)
        return LayerOutput(out, times)


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

    def stage0(self, hidden: Bits, residual: Bits) -> PendingMoe:
        """Send hidden [T, H] bf16 bits to the ducks, then run the shared expert."""
        ids, weights = self.router(hidden)
        routed = self.ducks.send(
            MoeRequest(
                layer_idx=self.layer_idx,
                hidden=hidden,
                topk_ids=ids,
                topk_weights=weights,
            )
        )
        return PendingMoe(residual, self.shared(hidden), routed)

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor | Matrix]]:
        yield from self.router.checkpoint_views(f"{prefix}.gate")
        yield from self.shared.checkpoint_views(f"{prefix}.shared_experts")
