"""Drafts with the MTP layer; draft tokens are sampled as the target's are.

vLLM's `EagleProposer` loads the layer and binds its caches; steps go by `draft`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_duck.spec_decode.confirmed import ConfirmedRows
from vllm_duck.spec_decode.plain_sampler import PlainSampler, SampledRow


@dataclass(frozen=True)
class Drafted:
    """The draft tokens of each request, and what they were drawn from.

    `rows` has one row of the batch per draft.
    """

    rows: tuple[SampledRow, ...]

    @property
    def token_ids(self) -> Tensor:
        """[B, K] int64."""
        return torch.stack([row.token_ids for row in self.rows], 1)


class DuckProposer(EagleProposer):
    def __init__(self, *args: Any, sampler: PlainSampler) -> None:
        super().__init__(*args)
        self.sampler = sampler

    def draft(
        self, rows: ConfirmedRows, sampling_metadata: SamplingMetadata
    ) -> Drafted:
        """Append the rows to the layer's caches, and draft behind each request's."""
        hidden = self.model.draft(
            rows.next_ids, rows.positions, rows.hidden, rows.batch, rows.last
        )
        return Drafted((self._sample(hidden, sampling_metadata),))

    def _sample(
        self, hidden: Tensor, sampling_metadata: SamplingMetadata
    ) -> SampledRow:
        """hidden [B, H] -> what is drafted for each request.

        A seeded request's draft is drawn with the very noise that its next token will
        be drawn with, so the two agree as often as their distributions allow.
        """
        logits = self.model.compute_logits(hidden)
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
        return self.sampler(logits, metadata)

    def _maybe_share_embeddings(self, target_language_model: Any) -> None:
        self.model.share_embedding(target_language_model.model.embed_tokens)

    def _maybe_share_lm_head(self, target_language_model: Any) -> None:
        self.model.share_head(target_language_model.lm_head)


def _copy(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy
