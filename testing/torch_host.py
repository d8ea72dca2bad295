"""The host's layer in plain torch: the slow, obvious reference of the kernels.

It reads weights by their checkpoint names (as `checkpoint_views` gives them), keeps its
own caches, and runs in any dtype: fp32 as an oracle, bf16 as the peer of benchmarks.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.cpu.attention import INDEX_NORM_EPS
from vllm_duck.models.cpu.threads import Bits
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_format import TILE, IndexFormat, LatentFormat
from vllm_duck.models.rope import half_split_to_interleaved, softmax_scale

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Rows of one request that are attended at once: bounds the logits' memory.
GROUP_ROWS = 256


def numpy_bits(x: Tensor) -> Bits:
    """The bits of x bf16, as the CPU backend passes rows."""
    return x.view(torch.int16).numpy().view(np.uint16)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn the heads x [T, heads, R] by rotations [T, 1, R / 2]; returns fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotations).flatten(-2)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, D] -> the bytes of its e4m3 values and of its scales, one per tile."""
    tiles = x.float().unflatten(-1, (-1, TILE))
    peaks = tiles.abs().amax(-1, keepdim=True)
    scales = torch.where(peaks > 0, peaks / E4M3_MAX, 1.0)
    values = (tiles / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return values.flatten(-2).view(torch.uint8), scales.flatten(-2).view(torch.uint8)


def dequantize(rows: Tensor, dim: int) -> Tensor:
    """The first `dim` e4m3 bytes times the scales behind them, [..., dim] fp32."""
    values = rows[..., :dim].contiguous().view(E4M3).float().unflatten(-1, (-1, TILE))
    scales = rows[..., dim : dim + 4 * (dim // TILE)].contiguous().view(torch.float32)
    return (values * scales.unsqueeze(-1)).flatten(-2)


def pack_latent(token_format: LatentFormat, latent: Tensor, rope: Tensor) -> Tensor:
    rope_bytes = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    if token_format.dtype == "bf16":
        latent_bytes = latent.to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([latent_bytes, rope_bytes], -1)
    return torch.cat([*quantize(latent), rope_bytes], -1)


def unpack_latent(token_format: LatentFormat, rows: Tensor) -> Tensor:
    """[..., token_bytes] uint8 -> keys [..., L + R] bf16."""
    if token_format.dtype == "bf16":
        return rows.view(torch.bfloat16)
    latent = dequantize(rows, token_format.latent_dim).to(torch.bfloat16)
    rope = rows[..., -2 * token_format.rope_dim :].contiguous().view(torch.bfloat16)
    return torch.cat([latent, rope], -1)


def pack_index(token_format: IndexFormat, keys: Tensor) -> Tensor:
    if token_format.dtype == "bf16":
        return keys.to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat(quantize(keys), -1)


def unpack_index(token_format: IndexFormat, rows: Tensor) -> Tensor:
    """[..., token_bytes] uint8 -> keys [..., D] fp32."""
    if token_format.dtype == "bf16":
        return rows.view(torch.bfloat16).float()
    return dequantize(rows, token_format.index_dim)


def choose(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Which positions each row attends to, [R, S]: the topk best that it sees.

    Of equal scores the later position wins.
    """
    num_positions = scores.shape[1]
    is_visible = torch.arange(num_positions) < visible[:, None]
    if num_positions <= topk:
        return is_visible
    scores = scores.masked_fill(~is_visible, float("-inf"))
    latest_first = scores.flip(1).sort(dim=1, descending=True, stable=True).indices
    chosen = num_positions - 1 - latest_first[:, :topk]
    is_chosen = torch.zeros_like(is_visible).scatter_(1, chosen, True)
    return is_chosen & is_visible


def route(
    dims: Dimensions, weight: Tensor, bias: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, H] -> ids [T, K], weights [T, K] fp32."""
    scores = F.linear(x.float(), weight.float()).sigmoid()
    biased = (scores + bias).unflatten(-1, (dims.n_group, -1))
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
    return ids, weights * dims.routed_scaling_factor


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


class TorchAttention:
    """hidden -> hidden + attention(input_norm(hidden)), and output_norm of that.

    `weights` by checkpoint name below "self_attn.", and "input_layernorm" and
    "post_attention_layernorm".
    """

    def __init__(
        self,
        dims: Dimensions,
        weights: dict[str, Tensor],
        *,
        latent_format: LatentFormat,
        index_format: IndexFormat,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        choose: Callable[[Tensor, Tensor, int], Tensor] = choose,
    ) -> None:
        self.dims = dims
        self.choose = choose
        self.weights = {name: w.to(dtype) for name, w in weights.items()}
        self.latent_format, self.index_format = latent_format, index_format
        self.latent_rows = _garbage(num_slots, latent_format.token_bytes)
        self.index_rows = _garbage(num_slots, index_format.token_bytes)
        heads = dims.num_attention_heads
        per_head = self.weights["kv_b_proj.weight"].unflatten(0, (heads, -1))
        nope, value = per_head.split([dims.qk_nope_head_dim, dims.v_head_dim], 1)
        self.key_up = nope.contiguous()
        self.value_up = value.transpose(1, 2).contiguous()
        self.scale = softmax_scale(
            dims.rope, dims.qk_nope_head_dim + dims.qk_rope_head_dim
        )

    def __call__(
        self, hidden: Tensor, rotations: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        weights = self.weights
        attended = self.attend(self._norm("input_layernorm", hidden), rotations, batch)
        residual = hidden + F.linear(attended, weights["o_proj.weight"])
        return residual, self._norm("post_attention_layernorm", residual)

    def attend(self, x: Tensor, rotations: Tensor, batch: AttentionBatch) -> Tensor:
        """x [T, H] normed -> the heads' values [T, A * V]."""
        dims, weights = self.dims, self.weights
        self._write(x, rotations, batch)
        low = F.linear(x, weights["q_a_proj.weight"])
        low = self._norm("q_a_layernorm", low)
        query = F.linear(low, weights["q_b_proj.weight"])
        query = query.unflatten(-1, (dims.num_attention_heads, -1))
        nope, rope = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], -1)
        latent = torch.bmm(nope.transpose(0, 1), self.key_up).transpose(0, 1)
        query = torch.cat([latent, rotate(rope, rotations).to(x.dtype)], -1)
        index_query = F.linear(low, weights["indexer.wq_b.weight"])
        index_query = self._index_rope(
            index_query.unflatten(-1, (dims.index_n_heads, -1)), rotations
        )
        index_weight = F.linear(x, weights["indexer.weights_proj.weight"]).float()
        index_weight *= dims.index_n_heads**-0.5 * dims.index_head_dim**-0.5
        out = x.new_zeros(x.shape[0], dims.num_attention_heads, dims.kv_lora_rank)
        for rows, visible, slots in row_groups(batch):
            keys = unpack_index(self.index_format, self.index_rows[slots])
            dots = torch.einsum("rhd,sd->rhs", index_query[rows], keys).relu_()
            scores = torch.einsum("rhs,rh->rs", dots, index_weight[rows])
            chosen = self.choose(scores, visible, dims.index_topk)
            out[rows] = self._mix(query[rows], slots, chosen)
        return torch.bmm(out.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1)

    def _mix(self, query: Tensor, slots: Tensor, is_chosen: Tensor) -> Tensor:
        keys = unpack_latent(self.latent_format, self.latent_rows[slots])
        keys = keys.to(query.dtype)
        num_rows, num_heads, _ = query.shape
        logits = (query.flatten(0, 1) @ keys.t()).view(num_rows, num_heads, -1)
        logits = logits.float().mul_(self.scale)
        logits.masked_fill_(~is_chosen[:, None], float("-inf"))
        mixed = logits.softmax(-1).to(query.dtype).flatten(0, 1)
        mixed = mixed @ keys[:, : self.dims.kv_lora_rank]
        return mixed.view(num_rows, num_heads, -1)

    def _write(self, x: Tensor, rotations: Tensor, batch: AttentionBatch) -> None:
        dims, weights = self.dims, self.weights
        kv = F.linear(x, weights["kv_a_proj_with_mqa.weight"])
        latent, rope = kv.split([dims.kv_lora_rank, dims.qk_rope_head_dim], -1)
        latent = self._norm("kv_a_layernorm", latent)
        rope = rotate(rope[:, None], rotations)[:, 0]
        key = F.layer_norm(
            F.linear(x, weights["indexer.wk.weight"]).float(),
            (dims.index_head_dim,),
            weights["indexer.k_norm.weight"].float(),
            weights["indexer.k_norm.bias"].float(),
            INDEX_NORM_EPS,
        )
        key = self._index_rope(key[:, None], rotations)[:, 0]
        num_tokens = batch.num_tokens
        packed = pack_latent(self.latent_format, latent, rope)[:num_tokens]
        slots = torch.from_numpy(batch.slots)
        self.latent_rows.index_copy_(0, slots, packed)
        packed = pack_index(self.index_format, key)[:num_tokens]
        self.index_rows.index_copy_(0, slots, packed)

    def _index_rope(self, heads: Tensor, rotations: Tensor) -> Tensor:
        """The indexer's half-split rotation; leaves the pairs interleaved, as ours."""
        rope_dim = self.dims.qk_rope_head_dim
        order = half_split_to_interleaved(rope_dim)
        turned = rotate(heads[..., :rope_dim][..., order], rotations)
        return torch.cat([turned, heads[..., rope_dim:].float()], -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.dims.rms_norm_eps)


def row_groups(batch: AttentionBatch):
    """(rows, visible [R], slots [S]) of runs of rows that share a context."""
    row = 0
    for request, table in zip(batch.requests, batch.block_table, strict=True):
        end = row + request.num_rows
        for lo in range(row, end, GROUP_ROWS):
            hi = min(lo + GROUP_ROWS, end)
            visible = torch.arange(lo, hi) - row + request.first_visible
            positions = torch.arange(int(visible[-1]))
            blocks = torch.from_numpy(table)[positions // batch.block_size].long()
            slots = blocks * batch.block_size + positions % batch.block_size
            yield slice(lo, hi), visible, slots
        row = end


def _garbage(num_slots: int, num_bytes: int) -> Tensor:
    return torch.full((num_slots, num_bytes), 0xFF, dtype=torch.uint8)
