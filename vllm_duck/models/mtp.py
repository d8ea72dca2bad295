"""The MTP layer: drafts from the target's hidden state and a token.

Row p takes the target's hidden state h[p] and the token x[p + 1], and predicts
x[p + 2]: layer(eh_proj([enorm(embed(x[p + 1])); hnorm(h[p])])), where the embedding of
row 0 counts as zero. Source: vLLM 0.32.0, deepseek_mtp.py::DeepSeekMultiTokenPredictor.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from vllm_duck.config import HandOver
from vllm_duck.executor.duck import Ducks
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.models.backend import Embedding, Head, Part, Step
from vllm_duck.models.batch import AttentionBatch, in_memory
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.platforms import host_backend
from vllm_duck.models.rope import Rope


class MtpDraftModel(nn.Module):
    """vLLM's contract of a draft model; weights come through `parts`.

    `embed_tokens` and `lm_head` are the target's unless the checkpoint holds others.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        # The target's: --hf-overrides and --hf-config-path reach no draft's config.
        model_config = vllm_config.speculative_config.target_model_config
        dims = self.dims = Dimensions.from_hf_config(model_config.hf_config)
        kv_dtype = HandOver.of(vllm_config).kv_dtype
        backend = self.backend = host_backend()
        self.layer_idx = dims.num_hidden_layers
        names = dims.family.tensors
        self.prefix = names.layer(self.layer_idx)
        own = Checkpoint(Path(model_config.model)).tensor_names
        size = (dims.vocab_size, dims.hidden_size)
        self.embed_tokens: Embedding | None = None
        if f"{self._in_layer(names.mtp_embedding)}.weight" in own:
            self.embed_tokens = backend.embedding(*size)
        self.lm_head: Head | None = None
        if f"{self._in_layer(names.mtp_head)}.weight" in own:
            self.lm_head = backend.head(*size)
        self.embed_norm = backend.norm(dims.hidden_size, dims.rms_norm_eps)
        self.hidden_norm = backend.norm(dims.hidden_size, dims.rms_norm_eps)
        self.projection = backend.linear(2 * dims.hidden_size, dims.hidden_size)
        self.caches = LayerCaches.of(dims, kv_dtype, f"{self.prefix}.self_attn")
        self.layer = backend.layer(dims, self.layer_idx, self.caches)
        self.head_norm = backend.norm(dims.hidden_size, dims.rms_norm_eps)
        self.rope = Rope(dims.rope, dims.qk_rope_head_dim)
        # Of the last confirmed rows.
        self._confirmed: Step

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """input_ids [T] of the next token, positions [T], hidden_states [T, H] normed.

        Returns hidden states [T, H], normed, twice: for the head, and for a next draft.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_input_ids(input_ids)
        step = self.backend.step(
            self.caches.current_batch(), self.rope.rotations(positions)
        )
        output = self._run(inputs_embeds, positions, hidden_states, step)
        hidden = self.head_norm(output)
        return hidden, hidden

    def draft(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden_states: Tensor,
        batch: AttentionBatch,
        wanted: Tensor | None = None,
        *,
        behind: Tensor | None = None,
    ) -> Tensor:
        """Append all rows to the caches; returns the hidden states [W, H], normed.

        behind: of each row the one that it drafts on from, among those of the last call
        without it; None: they are confirmed rows.

        Of the wanted rows, or of all: the others' output would go nowhere, so their
        experts are not asked for. As the target's hidden states are, so are these what
        the logits and a row behind are computed from.
        """
        embeds = self.embed_input_ids(input_ids)
        rotations = self.rope.rotations(positions)
        if behind is None:
            step = self._confirmed = self.backend.step(batch, rotations)
        else:
            step = self._confirmed.behind(in_memory(behind), batch, rotations)
        output = self._run(embeds, positions, hidden_states, step, wanted)
        return self.head_norm(output)

    def _run(
        self,
        inputs_embeds: Tensor,
        positions: Tensor,
        hidden_states: Tensor,
        step: Step,
        wanted: Tensor | None = None,
    ) -> Tensor:
        inputs_embeds = inputs_embeds.masked_fill(positions[:, None] == 0, 0)
        joined = torch.cat(
            [self.embed_norm(inputs_embeds), self.hidden_norm(hidden_states)], -1
        )
        backend = self.backend
        pending = self.layer.stage0(
            backend.enter(self.projection(joined)),
            step,
            None if wanted is None else in_memory(wanted),
        )
        return backend.leave(pending.wait().rows)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [W, H], normed -> [W, V] fp32."""
        assert self.lm_head is not None
        return self.lm_head.logits(hidden_states)

    def share_embedding(self, embed_tokens: Embedding) -> None:
        """Take the target's embedding, unless the layer's own differs."""
        if _is_same(self.embed_tokens, embed_tokens):
            self.embed_tokens = embed_tokens

    def share_head(self, lm_head: Head) -> None:
        """Take the target's head, unless the layer's own differs."""
        if _is_same(self.lm_head, lm_head):
            self.lm_head = lm_head

    def attach_ducks(self, ducks: Ducks) -> None:
        self.layer.attach_ducks(ducks)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """What has weights of its own, each with its name in the checkpoint."""
        names = self.dims.family.tensors
        if self.embed_tokens is not None:
            yield self._in_layer(names.mtp_embedding), self.embed_tokens
        if self.lm_head is not None:
            yield self._in_layer(names.mtp_head), self.lm_head
        yield self._in_layer(names.mtp_embedding_norm), self.embed_norm
        yield self._in_layer(names.mtp_hidden_norm), self.hidden_norm
        yield self._in_layer(names.mtp_projection), self.projection
        yield self.prefix, self.layer
        yield self._in_layer(names.mtp_norm), self.head_norm

    def _in_layer(self, name: str) -> str:
        return f"{self.prefix}.{name}"


def _is_same(own: Embedding | Head | None, shared: Embedding | Head) -> bool:
    if own is None:
        return True
    return torch.equal(own.weight, shared.weight)
