"""Multi-head latent attention, and the lightning indexer that makes it sparse."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import TinyConfig
from training.layers import RMSNorm, linear, rotate_halves, rotate_interleaved


@dataclass
class AttentionPlan:
    """What one forward pass asks of its attention layers, and what they report.

    has_history False lets every token see only itself: an MTP layer without cache.
    """

    is_sparse: bool = True
    trains_indexer: bool = False
    has_history: bool = True
    # One entry a layer, only with trains_indexer: the indexer's KL divergence, and
    # the share of dense attention that its top-k holds.
    indexer_losses: list[Tensor] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Positions:
    """Rotary tables cos, sin [T, rope / 2] and the additive causal mask [T, T]."""

    cos: Tensor
    sin: Tensor
    mask: Tensor


class Indexer(nn.Module):
    """Scores every earlier token; the main attention reads the top-k of them."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = linear(config.q_lora_rank, heads * width)
        self.wk = linear(config.hidden_size, width)
        self.k_norm = nn.LayerNorm(width, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, heads)

    def forward(self, x: Tensor, q_latent: Tensor, positions: Positions) -> Tensor:
        """Return scores [B, T, T] fp32, not yet masked."""
        config = self.config
        batch, length, _ = x.shape
        heads, width = config.index_n_heads, config.index_head_dim
        query = self.wq_b(q_latent).view(batch, length, heads, width).transpose(1, 2)
        key = self.k_norm(self.wk(x)).unsqueeze(1)
        query, key = self._rotate(query, positions), self._rotate(key, positions)
        scores = F.relu(query @ key.transpose(-1, -2))
        weights = self.weights_proj(x) * (heads * width) ** -0.5
        weights = weights.transpose(1, 2).unsqueeze(-1)
        return (scores * weights).sum(1, dtype=torch.float32)

    def _rotate(self, x: Tensor, positions: Positions) -> Tensor:
        rope = self.config.qk_rope_head_dim
        rotated = rotate_halves(x[..., :rope], positions.cos, positions.sin)
        return torch.cat([rotated, x[..., rope:]], -1)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_attention_heads
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        latent, eps = config.kv_lora_rank, config.rms_norm_eps
        self.q_a_proj = linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(hidden, latent + rope)
        self.kv_a_layernorm = RMSNorm(latent, eps)
        self.kv_b_proj = linear(latent, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, hidden)
        self.indexer = Indexer(config)
        # YaRN with mscale_all_dim 1 puts its temperature into the softmax scale.
        mscale = 0.1 * math.log(config.rope_factor) + 1
        self.scale = (nope + rope) ** -0.5 * mscale * mscale

    def forward(self, x: Tensor, positions: Positions, plan: AttentionPlan) -> Tensor:
        batch, length, _ = x.shape
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        query, key, value = self._heads(x, q_latent, positions)
        scores = torch.baddbmm(
            positions.mask.expand(len(query), length, length),
            query,
            key.transpose(1, 2),
        )
        reads_subset = length > self.config.index_topk
        attended = scores
        if plan.trains_indexer or (plan.is_sparse and reads_subset):
            index_scores = self._index(x, q_latent, positions, plan)
            kept = self._kept(index_scores) if reads_subset else None
            if plan.trains_indexer:
                self._teach(index_scores, scores, kept, plan)
            if plan.is_sparse and reads_subset:
                by_head = scores.view(batch, -1, length, length)
                attended = by_head.masked_fill(~kept.unsqueeze(1), -math.inf)
                attended = attended.view_as(scores)
        out = torch.softmax(attended, -1) @ value
        out = out.view(batch, -1, length, value.shape[-1]).transpose(1, 2)
        return self.o_proj(out.reshape(batch, length, -1))

    def _heads(
        self, x: Tensor, q_latent: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query (scaled), key, value, each [B * heads, T, width]."""
        config = self.config
        batch, length, _ = x.shape
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        rope, latent_width = config.qk_rope_head_dim, config.kv_lora_rank
        cos, sin = positions.cos, positions.sin

        query = self.q_b_proj(q_latent).view(batch, length, heads, nope + rope)
        q_nope, q_rope = query.transpose(1, 2).split([nope, rope], -1)
        query = torch.cat([q_nope, rotate_interleaved(q_rope, cos, sin)], -1)

        latent, k_rope = self.kv_a_proj_with_mqa(x).split([latent_width, rope], -1)
        k_rope = rotate_interleaved(k_rope.unsqueeze(1), cos, sin)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent))
        expanded = expanded.view(batch, length, heads, -1).transpose(1, 2)
        k_nope, value = expanded.split([nope, config.v_head_dim], -1)
        key = torch.cat([k_nope, k_rope.expand(-1, heads, -1, -1)], -1)
        return (
            (query * self.scale).flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
        )

    def _index(
        self, x: Tensor, q_latent: Tensor, positions: Positions, plan: AttentionPlan
    ) -> Tensor:
        # Detached: the indexer learns from its own loss only, as in the paper.
        with torch.set_grad_enabled(plan.trains_indexer):
            scores = self.indexer(x.detach(), q_latent.detach(), positions)
            return scores + positions.mask.float()

    def _kept(self, index_scores: Tensor) -> Tensor:
        chosen = index_scores.detach().topk(self.config.index_topk, -1, sorted=False)
        kept = torch.zeros_like(index_scores, dtype=torch.bool)
        return kept.scatter_(-1, chosen.indices, True)

    def _teach(
        self,
        index_scores: Tensor,
        scores: Tensor,
        kept: Tensor | None,
        plan: AttentionPlan,
    ) -> None:
        """Record KL(dense attention, mean over heads || indexer).

        The target is the dense attention also in sparse training: with the sparse
        one the selection would teach itself and its coverage reads as 1.
        """
        batch, length, _ = index_scores.shape
        dense = torch.softmax(scores.detach(), -1).view(batch, -1, length, length)
        target = dense.mean(1, dtype=torch.float32)
        log_guess = F.log_softmax(index_scores.clamp(min=-1e4), -1)
        # kl_div's sum is over x log x - x log_guess, 0 where the target is 0.
        divergence = F.kl_div(log_guess, target, reduction="sum")
        plan.indexer_losses.append(divergence / (batch * length))
        if kept is not None:
            mass = (target * kept).sum(-1)
            plan.captured.append(mass[:, self.config.index_topk :].mean())
