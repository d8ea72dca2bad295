"""A second backend of the host, slow and obvious: plain torch in fp32.

It proves the seam (`vllm_duck.models.backend`): other rows, other weights, and rows
that are ready only some time after stage 0 has begun, as on a device.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from testing import torch_host
from vllm_duck.executor.duck import MoeRequest
from vllm_duck.models.backend import LayerOutput
from vllm_duck.models.batch import AttentionBatch

E4M3 = torch.float8_e4m3fn


def parameter(*shape: int, dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


@dataclass(frozen=True)
class TorchStep:
    batch: AttentionBatch
    rotations: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.rotations)

    def lane(self, index, batch: AttentionBatch) -> "TorchStep":
        return TorchStep(batch, self.rotations[index])

    def behind(self, index, batch: AttentionBatch, rotations: Tensor) -> "TorchStep":
        return TorchStep(batch, rotations)


class Part(nn.Module):
    """Computes with the weights as they were loaded."""

    def finish_loading(self) -> None:
        pass


class Norm(Part):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = parameter(size), eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return normed.to(torch.bfloat16)

    def checkpoint_views(self, prefix):
        yield f"{prefix}.weight", self.weight.data


class Linear(Part):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight).to(torch.bfloat16)

    def checkpoint_views(self, prefix):
        yield f"{prefix}.weight", self.weight.data


class Embedding(Part):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=torch.bfloat16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)

    def checkpoint_views(self, prefix):
        yield f"{prefix}.weight", self.weight.data


class Head(Embedding):
    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())


class CodeLinear(nn.Module):
    """Holds e4m3 codes and block scales as the checkpoint has them."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.codes = parameter(out_features, in_features, dtype=E4M3)
        self.scales = parameter(-(-out_features // 128), -(-in_features // 128))

    def weight(self) -> Tensor:
        rows, columns = self.codes.shape
        scales = self.scales.repeat_interleave(128, 0)[:rows]
        return self.codes.float() * scales.repeat_interleave(128, 1)[:, :columns]

    def checkpoint_views(self, prefix):
        yield f"{prefix}.weight", self.codes.data
        yield f"{prefix}.weight_scale_inv", self.scales.data


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = CodeLinear(hidden_size, intermediate_size)
        self.up_proj = CodeLinear(hidden_size, intermediate_size)
        self.down_proj = CodeLinear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = torch.cat([self.gate_proj.weight(), self.up_proj.weight()])
        return torch_host.mlp(x, gate_up, self.down_proj.weight())

    def checkpoint_views(self, prefix):
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield from self.get_submodule(name).checkpoint_views(f"{prefix}.{name}")


class TorchLayer(Part):
    """Attention over the caches that vLLM allocated, and the MLP or the ducks."""

    def __init__(self, dims, layer_idx, caches) -> None:
        super().__init__()
        dims.family.require(indexer=("in every layer",), index_rope=("half-split",))
        self.dims, self.layer_idx, self.caches = dims, layer_idx, caches
        self.is_moe = layer_idx in dims.moe_layer_ids
        width = dims.intermediate_size
        if self.is_moe:
            width = dims.moe_intermediate_size * dims.n_shared_experts
            self.gate = parameter(dims.n_routed_experts, dims.hidden_size)
            self.bias = parameter(dims.n_routed_experts)
        self.mlp = Mlp(dims.hidden_size, width)
        self.weights = {name: torch.zeros(size) for name, size in _shapes(dims)}
        self.attention = None
        self.ducks = None

    def attach_ducks(self, ducks) -> None:
        self.ducks = ducks

    def stage0(self, rows: Tensor, step: TorchStep, wanted=None):
        residual, normed = self._attended(rows, step)
        if wanted is not None:
            residual, normed = residual[wanted], normed[wanted]
            if not len(residual):
                return Pending(residual)
        if not self.is_moe:
            return Pending(residual + self.mlp(normed))
        ids, weights = torch_host.route(self.dims, self.gate, self.bias, normed)
        request = MoeRequest(
            layer_idx=self.layer_idx,
            hidden=normed.to(torch.bfloat16).view(torch.uint16).numpy(),
            topk_ids=ids.int().numpy(),
            topk_weights=weights.numpy(),
        )
        return Pending(residual + self.mlp(normed), self.ducks, request)

    def checkpoint_views(self, prefix):
        for name, view in self.weights.items():
            is_outer = name.startswith(("input_layernorm", "post_attention"))
            yield f"{prefix}.{'' if is_outer else 'self_attn.'}{name}", view
        if not self.is_moe:
            yield from self.mlp.checkpoint_views(f"{prefix}.mlp")
            return
        yield f"{prefix}.mlp.gate.weight", self.gate.data
        yield f"{prefix}.mlp.gate.e_score_correction_bias", self.bias.data
        yield from self.mlp.checkpoint_views(f"{prefix}.mlp.shared_experts")

    def _attended(self, rows: Tensor, step: TorchStep):
        latent, index = self.caches.latent, self.caches.index
        if self.attention is None:
            self.attention = torch_host.TorchAttention(
                self.dims,
                self.weights,
                latent_format=latent.format,
                index_format=index.format,
                num_slots=0,
            )
        if latent.kv_cache.numel() == 0:
            # vLLM's profiling run has no caches.
            return rows, rows
        self.attention.latent_rows = latent.kv_cache.view(-1, latent.format.token_bytes)
        self.attention.index_rows = index.kv_cache.view(-1, index.format.token_bytes)
        return self.attention(rows, step.rotations, step.batch)


class Pending:
    """Its rows are ready, and then sent, when it is asked for the second time."""

    def __init__(self, rows: Tensor, ducks=None, request=None) -> None:
        self.rows, self.ducks, self.request = rows, ducks, request
        self.num_polls, self.sum = 0, None

    def is_sent(self) -> bool:
        self.num_polls += 1
        if self.request is not None and self.sum is None and self.num_polls > 1:
            self.sum = self.ducks.send(self.request)
        return self.request is None or self.sum is not None

    def is_done(self) -> bool:
        return self.is_sent() and (self.sum is None or self.sum.is_done())

    def wait(self) -> LayerOutput:
        while not self.is_sent():
            pass
        if self.sum is None:
            return LayerOutput(self.rows, None)
        routed, times = self.sum.wait()
        return LayerOutput(self.rows + torch.from_numpy(routed), times)


class TorchBackend:
    """`vllm_duck.models.backend.HostBackend`; rows are fp32 tensors."""

    layer, norm, linear = TorchLayer, Norm, Linear
    embedding, head, step = Embedding, Head, TorchStep

    def enter(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def leave(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16)

    def take(self, rows: Tensor, index) -> Tensor:
        return rows[index]

    def concat(self, parts) -> Tensor:
        return torch.cat(parts)


def _shapes(dims):
    """Of the attention block's tensors, by checkpoint name."""
    heads, rope = dims.num_attention_heads, dims.qk_rope_head_dim
    nope, value = dims.qk_nope_head_dim, dims.v_head_dim
    hidden, low, latent = dims.hidden_size, dims.q_lora_rank, dims.kv_lora_rank
    index = dims.index_n_heads * dims.index_head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "q_a_proj.weight", (low, hidden)
    yield "q_a_layernorm.weight", (low,)
    yield "q_b_proj.weight", (heads * (nope + rope), low)
    yield "kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (heads * (nope + value), latent)
    yield "o_proj.weight", (hidden, heads * value)
    yield "indexer.wq_b.weight", (index, low)
    yield "indexer.wk.weight", (dims.index_head_dim, hidden)
    yield "indexer.k_norm.weight", (dims.index_head_dim,)
    yield "indexer.k_norm.bias", (dims.index_head_dim,)
    yield "indexer.weights_proj.weight", (dims.index_n_heads, hidden)
