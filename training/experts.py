"""The mixture of experts: DeepSeek's router and a sorted expert loop."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import TinyConfig
from training.layers import MLP, swiglu_backward

# Rows per expert are padded to a multiple of this. oneDNN compiles a kernel for each
# new row count, and counts differ every step: unpadded, that took a third of a step.
ROW_MULTIPLE = 64


@dataclass(frozen=True)
class _Rows:
    """Where each (token, choice) sits in the buffer that is sorted by expert.

    Shapes: T tokens, K choices, R padded rows.
        place   [T * K]  row of a choice       source  [R]  token of a row, 0 if padding
    """

    place: Tensor
    source: Tensor
    spans: list[slice]

    @classmethod
    def sort(cls, expert_ids: Tensor, num_experts: int) -> "_Rows":
        flat_ids = expert_ids.reshape(-1)
        counts = torch.bincount(flat_ids, minlength=num_experts)
        padded = (counts + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
        ends = padded.cumsum(0)
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        order = torch.argsort(flat_ids, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order)) + shift[flat_ids[order]]
        source = order.new_zeros(int(ends[-1]))
        source[place] = torch.arange(len(order)) // expert_ids.shape[1]
        spans = zip((ends - padded).tolist(), ends.tolist(), strict=True)
        return cls(place, source, [slice(*span) for span in spans])


class _ExpertLoop(torch.autograd.Function):
    """Run every token through its experts, sorted so that each is one matmul.

    Shapes: T tokens, H hidden, K experts per token, E experts, I inner columns.
        x        [T, H]        expert_ids  [T, K]     weights  [T, K]  fp32
        gate_up  [E, 2I, H]    down        [E, H, I]
    The backward is written out: autograd would scatter gradients with index_add,
    which is slow on CPU.
    """

    @staticmethod
    def forward(ctx, x, weights, expert_ids, gate_up, down):
        rows = _Rows.sort(expert_ids, len(gate_up))
        inputs = x[rows.source]
        mixed = inputs.new_empty(len(inputs), gate_up.shape[1])
        for expert, span in enumerate(rows.spans):
            torch.mm(inputs[span], gate_up[expert].t(), out=mixed[span])
        gate, up = mixed.chunk(2, -1)
        inner = F.silu(gate) * up
        out = torch.empty_like(inputs)
        for expert, span in enumerate(rows.spans):
            torch.mm(inner[span], down[expert].t(), out=out[span])

        # Padding keeps weight 0, so it adds nothing to any gradient.
        row_weights = weights.new_zeros(len(inputs))
        row_weights[rows.place] = weights.reshape(-1)
        row_weights = row_weights.to(x.dtype).unsqueeze(1)
        ctx.rows = rows
        ctx.save_for_backward(inputs, row_weights, gate_up, down, mixed, inner, out)
        weighted = (out * row_weights)[rows.place]
        return weighted.view(*expert_ids.shape, -1).sum(1)

    @staticmethod
    def backward(ctx, grad):
        inputs, row_weights, gate_up, down, mixed, inner, out = ctx.saved_tensors
        rows = ctx.rows
        grad_rows = grad[rows.source]
        grad_weights = (grad_rows * out).sum(-1, dtype=torch.float32)[rows.place]
        grad_out = grad_rows * row_weights

        grad_down = torch.empty_like(down)
        grad_inner = torch.empty_like(inner)
        for expert, span in enumerate(rows.spans):
            torch.mm(grad_out[span], down[expert], out=grad_inner[span])
            torch.mm(grad_out[span].t(), inner[span], out=grad_down[expert])

        grad_mixed = swiglu_backward(grad_inner, mixed)
        grad_gate_up = torch.empty_like(gate_up)
        grad_inputs = torch.empty_like(inputs)
        for expert, span in enumerate(rows.spans):
            torch.mm(grad_mixed[span], gate_up[expert], out=grad_inputs[span])
            torch.mm(grad_mixed[span].t(), inputs[span], out=grad_gate_up[expert])
        grad_choices = grad_inputs[rows.place].view(len(grad), -1, grad.shape[1])
        grad_weights = grad_weights.view(len(grad), -1)
        return grad_choices.sum(1), grad_weights, None, grad_gate_up, grad_down


class Gate(nn.Module):
    """The noaux_tc router: biased scores choose, unbiased scores weigh."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.n_routed_experts, config.hidden_size)
        std = 0.5 / math.sqrt(config.hidden_size)
        self.weight = nn.Parameter(torch.randn(shape) * std)
        bias = torch.zeros(config.n_routed_experts)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (expert_ids [T, K], weights [T, K] fp32) for x [T, H]."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        expert_ids = self._choose(scores.detach() + self.e_score_correction_bias)
        weights = scores.gather(1, expert_ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return expert_ids, weights * self.config.routed_scaling_factor

    def _choose(self, biased: Tensor) -> Tensor:
        config = self.config
        grouped = biased.view(len(biased), config.n_group, -1)
        group_scores = grouped.topk(2, -1).values.sum(-1)
        group_ids = group_scores.topk(config.topk_group, -1, sorted=False).indices
        is_open = torch.zeros_like(group_scores, dtype=torch.bool)
        is_open.scatter_(1, group_ids, True)
        allowed = grouped.masked_fill(~is_open.unsqueeze(-1), -math.inf).flatten(1)
        return allowed.topk(config.num_experts_per_tok, -1, sorted=False).indices


class MoE(nn.Module):
    """Routed plus shared experts; the routed ones are stacked until export."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        experts, inner = config.n_routed_experts, config.moe_intermediate_size
        hidden = config.hidden_size
        gate_up = torch.randn(experts, 2 * inner, hidden) * 0.5 / math.sqrt(hidden)
        down = torch.randn(experts, hidden, inner) * 0.25 / math.sqrt(inner)
        self.gate = Gate(config)
        self.gate_up = nn.Parameter(gate_up)
        self.down = nn.Parameter(down)
        self.shared_experts = MLP(hidden, inner * config.n_shared_experts)
        # Tokens each expert got in the last call; the trainer balances with it.
        self.load = torch.zeros(experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        expert_ids, weights = self.gate(flat)
        self.load = torch.bincount(expert_ids.reshape(-1), minlength=len(self.down))
        routed = _ExpertLoop.apply(flat, weights, expert_ids, self.gate_up, self.down)
        return (routed + self.shared_experts(flat)).view_as(x)

    @torch.no_grad()
    def balance(self, step_size: float) -> None:
        """Move the choice bias towards experts that got too few tokens."""
        load = self.load.float()
        bias = self.gate.e_score_correction_bias
        bias += step_size * torch.sign(load.mean() - load)
