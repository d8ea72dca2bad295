"""Drafts with the MTP layer: vLLM's proposer, its draft tokens sampled as the target's.

vLLM's `EagleProposer` shifts the tokens, cuts the rejected rows out (the batch is not
padded) and runs the layer. So the layer's cache holds confirmed tokens only.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_duck.spec_decode.plain_sampler import PlainSampler, Row


class DuckProposer(EagleProposer):
    def __init__(self, *args: Any, sampler: PlainSampler) -> None:
        super().__init__(*args)
        self.sampler = sampler
        # What the latest drafts were drawn from: one row of the batch per draft.
        self.rows: list[Row] = []

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        self.rows = []
        return super().propose(*args, **kwargs)

    def _sample_draft_tokens(
        self, hidden_states: Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[Tensor, None]:
        """hidden_states [B, H] -> draft tokens [B] int64.

        A seeded request's draft is drawn with the very noise that its next token will
        be drawn with, so the two agree as often as their distributions allow.
        """
        logits = self.model.compute_logits(hidden_states)
        for processor in sampling_metadata.logitsprocs.all:
            processor.update_state(None)
        metadata = replace(
            sampling_metadata,
            generators={i: _copy(g) for i, g in sampling_metadata.generators.items()},
            max_num_logprobs=None,
            logprob_token_ids=None,
            # Its budget is counted in tokens taken; drafts are none.
            thinking_budget_state_holder=None,
        )
        row = self.sampler(logits, metadata)
        self.rows.append(row)
        return row.token_ids, None

    def _maybe_share_embeddings(self, target_language_model: Any) -> None:
        self.model.share_embedding(target_language_model.model.embed_tokens)

    def _maybe_share_lm_head(self, target_language_model: Any) -> None:
        self.model.share_head(target_language_model.lm_head)


def _copy(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy
