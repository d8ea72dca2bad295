"""Drafts with the MTP layer; draft tokens are sampled as the target's are.

vLLM's `EagleProposer` loads the layer and binds its caches; steps go by `draft`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_duck.spec_decode.confirmed import ConfirmedRows
from vllm_duck.spec_decode.deeper import deeper_rows
from vllm_duck.spec_decode.drafts import NO_TOKEN
from vllm_duck.spec_decode.outputs import appended
from vllm_duck.spec_decode.plain_sampler import PlainSampler, SampledRow


@dataclass(frozen=True)
class Drafted:
    """The draft tokens of each request, and what they were drawn from.

    rows        a row of the batch for each of the K drafts
    num_drafts  of each of the B requests, 1 to K
    """

    rows: tuple[SampledRow, ...]
    num_drafts: tuple[int, ...]

    @property
    def token_ids(self) -> Tensor:
        """[B, K] int64, NO_TOKEN where a request has fewer drafts."""
        token_ids = torch.stack([row.token_ids for row in self.rows], 1)
        depths = torch.arange(len(self.rows))
        is_draft = depths < torch.tensor(self.num_drafts)[:, None]
        return token_ids.where(is_draft, NO_TOKEN)


class DuckProposer(EagleProposer):
    def __init__(self, *args: Any, sampler: PlainSampler) -> None:
        super().__init__(*args)
        self.sampler = sampler

    def draft(
        self,
        rows: ConfirmedRows,
        sampling_metadata: SamplingMetadata,
        *,
        room: Sequence[int],
        output_token_ids: Sequence[list[int]],
    ) -> Drafted:
        """Append the rows to the layer's caches; draft behind each request's last row.

        room: see deeper_rows. output_token_ids: of each request, to which its drafts
        belong while deeper ones are drawn, as in verification.
        """
        hidden = self.model.draft(
            rows.next_ids, rows.positions, rows.hidden, rows.batch, rows.last
        )
        metadata = _drafting(sampling_metadata)
        # For the first draft alone: what processors learn of an output they keep, and
        # drafts may be refused. So min_tokens holds stop tokens back a little longer.
        for processor in metadata.logitsprocs.all:
            processor.update_state(None)
        sampled = [self._sample(hidden, metadata)]
        num_drafts = [1] * len(room)
        with appended(output_token_ids) as append:
            while len(sampled) < self.num_speculative_tokens:
                deeper = deeper_rows(rows, len(sampled), room)
                if deeper is None:
                    break
                requests = deeper.requests
                token_ids = sampled[-1].token_ids[requests]
                for i, token_id in zip(
                    requests.tolist(), token_ids.tolist(), strict=True
                ):
                    append(i, token_id)
                    num_drafts[i] += 1
                hidden[requests] = self.model.draft(
                    token_ids, deeper.positions, hidden[requests], deeper.batch
                )
                sampled.append(self._sample(hidden, metadata))
        return Drafted(tuple(sampled), tuple(num_drafts))

    def _sample(self, hidden: Tensor, metadata: SamplingMetadata) -> SampledRow:
        """hidden [B, H] -> what is drafted for each request."""
        return self.sampler(self.model.compute_logits(hidden), metadata)

    def _maybe_share_embeddings(self, target_language_model: Any) -> None:
        self.model.share_embedding(target_language_model.model.embed_tokens)

    def _maybe_share_lm_head(self, target_language_model: Any) -> None:
        self.model.share_head(target_language_model.lm_head)


def _drafting(metadata: SamplingMetadata) -> SamplingMetadata:
    """The requests' options, to draw drafts with.

    A seeded request's drafts are drawn with the very noise that its next tokens will be
    drawn with, so the two agree as often as their distributions allow.
    """
    return replace(
        metadata,
        generators={i: _copy(g) for i, g in metadata.generators.items()},
        max_num_logprobs=None,
        logprob_token_ids=None,
        # Its budget is counted in tokens taken; drafts are none.
        thinking_budget_state_holder=None,
    )


def _copy(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy
