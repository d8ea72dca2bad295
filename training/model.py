"""A plain-torch DeepSeek-V3.2 with its MTP layer, written to train on CPU.

Parameters carry the official names below `model.`, except that the routed experts
are stacked (`mlp.gate_up`, `mlp.down`) and that the MTP layer's embedding and head
are the trunk's; export.py writes both out as the official files do.
"""

import math

import torch
from torch import Tensor, nn

from training.attention import Attention, AttentionPlan, Positions
from training.config import TinyConfig
from training.experts import MoE
from training.layers import MLP, RMSNorm, linear, yarn_frequencies


class Block(nn.Module):
    def __init__(self, config: TinyConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        is_dense = layer_idx < config.first_k_dense_replace
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, config.intermediate_size) if is_dense else MoE(config)

    def forward(self, x: Tensor, positions: Positions, plan: AttentionPlan) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, plan)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPBlock(Block):
    """The draft layer: from h[p] and the embedding of x[p+1], guess x[p+2]."""

    def __init__(self, config: TinyConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(hidden, eps)

    def draft(
        self, embeds: Tensor, hidden: Tensor, positions: Positions, plan: AttentionPlan
    ) -> Tensor:
        # vLLM blanks the embedding at position 0; training must see the same.
        embeds = torch.cat([torch.zeros_like(embeds[:, :1]), embeds[:, 1:]], 1)
        joined = torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1)
        return self.shared_head.norm(self(self.eh_proj(joined), positions, plan))


class TinyModel(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        num_layers = config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        blocks = [Block(config, layer_idx) for layer_idx in range(num_layers)]
        self.layers = nn.ModuleList([*blocks, MTPBlock(config, num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.01)
        self._frequencies = yarn_frequencies(config)
        self._positions: dict[tuple[int, torch.dtype, bool], Positions] = {}

    def trunk(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the post-final-norm hidden states [B, T, H] of token_ids [B, T]."""
        x = self.embed_tokens(token_ids)
        positions = self._table(token_ids.shape[1], x.dtype, plan)
        for block in self.layers[:-1]:
            x = block(x, positions, plan)
        return self.norm(x)

    def draft(self, next_ids: Tensor, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the MTP hidden states [B, T, H]; row p predicts x[p+2].

        next_ids [B, T] holds x[p+1] at row p, hidden [B, T, H] the trunk's output.
        """
        embeds = self.embed_tokens(next_ids)
        positions = self._table(next_ids.shape[1], embeds.dtype, plan)
        return self.layers[-1].draft(embeds, hidden, positions, plan)

    def moe_layers(self) -> list[MoE]:
        return [block.mlp for block in self.layers if isinstance(block.mlp, MoE)]

    def _table(self, length: int, dtype: torch.dtype, plan: AttentionPlan) -> Positions:
        key = (length, dtype, plan.has_history)
        if key not in self._positions:
            angles = torch.arange(length).float()[:, None] * self._frequencies
            mask = torch.full((length, length), -math.inf)
            if plan.has_history:
                mask = mask.triu(1)
            else:
                mask.fill_diagonal_(0)
            tables = (angles.cos(), angles.sin(), mask)
            self._positions[key] = Positions(*(table.to(dtype) for table in tables))
        return self._positions[key]
