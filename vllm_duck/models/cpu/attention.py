"""The attention block of a layer: MLA over what the lightning indexer chooses.

A layer without an indexer attends to what a layer before it has chosen.

One call of the kernels takes the block from norm to norm: csrc/host/kernels/attend.h.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.linear import MergedLinear, Norm, floats, weight_parameter
from vllm_duck.models.cpu.packing import HostModule, pack
from vllm_duck.models.cpu.step import Choices, CpuStep, Rotations
from vllm_duck.models.cpu.threads import Bits, Handle, current, require_bits
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.matrix import Matrix
from vllm_duck.models.rope import half_split_to_interleaved, softmax_scale

INDEX_NORM_EPS = 1e-6
_ROTATIONS_DTYPE = np.dtype(np.complex64)


class SparseAttention(HostModule):
    """hidden -> hidden + attention(input_norm(hidden)), and output_norm of that.

    Raises:
        DuckConfigError: the family attends by other rules.
    """

    def __init__(
        self, dims: Dimensions, caches: LayerCaches, *, keeps_choices: bool = False
    ) -> None:
        """keeps_choices: layers behind it read them (`Dimensions.is_choice_kept`)."""
        super().__init__()
        dims.family.require(
            indexer=("in every layer", "in full layers"),
            rope=("interleaved",),
            index_rope=("half-split", "interleaved"),
        )
        self.dims = dims
        self.has_indexer = caches.index is not None
        self.keeps_choices = keeps_choices
        self.index_n_heads = dims.index_n_heads if self.has_indexer else 0
        self.index_head_dim = dims.index_head_dim if self.has_indexer else 0
        heads, rope_dim = dims.num_attention_heads, dims.qk_rope_head_dim
        self.qk_head_dim = dims.qk_nope_head_dim + rope_dim
        # The kernels read these weights in this order: AttentionView in
        # csrc/host/kernels/kernels.h.
        down = {
            "q_a_proj": dims.q_lora_rank,
            "kv_a_proj_with_mqa": dims.kv_lora_rank + rope_dim,
        }
        up = {"q_b_proj": heads * self.qk_head_dim}
        if self.has_indexer:
            down["indexer.wk"] = self.index_head_dim
            down["indexer.weights_proj"] = self.index_n_heads
            up["indexer.wq_b"] = self.index_n_heads * self.index_head_dim
        self.down = MergedLinear(dims.hidden_size, down)
        self.up = MergedLinear(dims.q_lora_rank, up)
        self.kv_b = MergedLinear(
            dims.kv_lora_rank,
            {"kv_b_proj": heads * (dims.qk_nope_head_dim + dims.v_head_dim)},
        )
        self.out = MergedLinear(heads * dims.v_head_dim, {"o_proj": dims.hidden_size})
        self.input_norm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.output_norm = Norm(dims.hidden_size, dims.rms_norm_eps)
        self.q_norm = Norm(dims.q_lora_rank, dims.rms_norm_eps)
        self.kv_norm = Norm(dims.kv_lora_rank, dims.rms_norm_eps)
        # fp32, as the official code keeps them.
        self.index_norm = weight_parameter(self.index_head_dim, dtype=torch.float32)
        self.index_bias = weight_parameter(self.index_head_dim, dtype=torch.float32)
        self.latent_cache = caches.latent
        self.index_cache = caches.index
        self.packed: Handle

    def forward(self, hidden: Bits, step: CpuStep) -> tuple[Bits, Bits]:
        """Attend the step's tokens; they are the first of the T rows.

        hidden [T, H] bf16 bits -> residual [T, H] and normed [T, H], bf16 bits. Rows
        beyond the step's batch are padding: their attention is 0.

        Raises:
            DuckShapeError: they have other shapes, dtypes or layouts.
        """
        require_bits("hidden", hidden, self.dims.hidden_size)
        self._require_rotations(step.rotations, len(hidden))
        if step.batch.num_tokens > len(hidden):
            raise DuckShapeError(
                f"hidden must have a row for each of the step's "
                f"{step.batch.num_tokens} tokens, got {len(hidden)}"
            )
        choices = self._choices(step)
        index_cache = self.index_cache
        residual, normed = np.empty_like(hidden), np.empty_like(hidden)
        _host.attend(
            current(),
            self.packed,
            step.handle,
            hidden.shape[0],
            hidden,
            step.rotations,
            self.latent_cache.kv_cache.data_ptr(),
            0 if index_cache is None else index_cache.kv_cache.data_ptr(),
            0 if choices is None else choices,
            step.is_chosen or not self.has_indexer,
            residual,
            normed,
        )
        return residual, normed

    def _choices(self, step: CpuStep) -> Choices | None:
        """Where the kernel reads or writes what rows attend to; None: nowhere."""
        topk = self.dims.index_topk
        if self.keeps_choices and not step.is_chosen:
            return step.keep_choices(topk)
        if self.has_indexer and not step.is_chosen:
            return None
        choices = step.choices
        if choices is None or choices.shape != (step.num_rows, topk):
            raise DuckShapeError(
                f"a layer without an indexer needs choices [{step.num_rows}, {topk}] "
                f"of a layer before it, got {getattr(choices, 'shape', None)}"
            )
        return choices

    def _require_rotations(self, rotations: Rotations, num_rows: int) -> None:
        shape = (num_rows, 1, self.dims.qk_rope_head_dim // 2)
        is_complex64 = rotations.dtype == _ROTATIONS_DTYPE
        is_whole = rotations.shape == shape and rotations.flags.c_contiguous
        if not (is_complex64 and is_whole):
            raise DuckShapeError(
                f"rotations must be {shape} complex64, contiguous, got "
                f"{rotations.shape} {rotations.dtype}, strides {rotations.strides}"
            )

    def checkpoint_views(self, prefix: str) -> Iterator[tuple[str, Tensor | Matrix]]:
        for module in (self.down, self.up, self.kv_b, self.out):
            yield from module.checkpoint_views(prefix)
        yield from self.q_norm.checkpoint_views(f"{prefix}.q_a_layernorm")
        yield from self.kv_norm.checkpoint_views(f"{prefix}.kv_a_layernorm")
        if self.has_indexer:
            yield f"{prefix}.indexer.k_norm.weight", self.index_norm.data
            yield f"{prefix}.indexer.k_norm.bias", self.index_bias.data

    def finish_loading(self) -> None:
        dims = self.dims
        if self.has_indexer and dims.family.rules.index_rope.name == "half-split":
            self._interleave_index_rope()
        self.packed = pack(
            _host.attention_new,
            hidden_size=dims.hidden_size,
            num_attention_heads=dims.num_attention_heads,
            q_lora_rank=dims.q_lora_rank,
            kv_lora_rank=dims.kv_lora_rank,
            qk_nope_head_dim=dims.qk_nope_head_dim,
            qk_rope_head_dim=dims.qk_rope_head_dim,
            v_head_dim=dims.v_head_dim,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
            index_topk=dims.index_topk,
            is_fp8=self.latent_cache.format.dtype == "fp8",
            scale=softmax_scale(dims.rope, self.qk_head_dim),
            index_scale=dims.index_n_heads**-0.5 * dims.index_head_dim**-0.5,
            eps=dims.rms_norm_eps,
            index_eps=INDEX_NORM_EPS,
            down=self.down.matrices,
            up=self.up.matrices,
            kv_b=self.kv_b.matrices,
            out=self.out.matrices,
            input_norm=floats(self.input_norm.weight),
            q_norm=floats(self.q_norm.weight),
            kv_norm=floats(self.kv_norm.weight),
            output_norm=floats(self.output_norm.weight),
            index_norm=floats(self.index_norm),
            index_bias=floats(self.index_bias),
        )
        del self.down, self.up, self.kv_b, self.out

    def _interleave_index_rope(self) -> None:
        """Bring the indexer's half-split RoPE to the layout of the main one."""
        dims = self.dims
        order = torch.arange(dims.index_head_dim)
        order[: dims.qk_rope_head_dim] = half_split_to_interleaved(
            dims.qk_rope_head_dim
        )
        first = torch.arange(dims.index_n_heads)[:, None] * dims.index_head_dim
        self.up.parts["indexer.wq_b"].reorder((first + order).flatten())
        self.down.parts["indexer.wk"].reorder(order)
        for parameter in (self.index_norm, self.index_bias):
            parameter.data.copy_(parameter.data[order].clone())
