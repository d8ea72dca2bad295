"""Drafts with the MTP layer; draft tokens are sampled as the target's are.

vLLM's `EagleProposer` loads the layer and binds its caches; steps go by `draft`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
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
    num_drafts  of each of the B requests, 0 to K
    passes      the runs of the MTP layer: requests that drafted, seconds
    """

    rows: tuple[SampledRow, ...]
    num_drafts: tuple[int, ...]
    passes: tuple[tuple[int, float], ...]

    @property
    def token_ids(self) -> Tensor:
        """[B, K] int64, NO_TOKEN where a request has fewer drafts."""
        num_drafts = torch.tensor(self.num_drafts)
        token_ids = torch.full((len(num_drafts), len(self.rows)), NO_TOKEN)
        for depth, row in enumerate(self.rows):
            token_ids[:, depth] = row.token_ids.where(num_drafts > depth, NO_TOKEN)
        return token_ids


class DuckProposer(EagleProposer):
    def __init__(self, *args: Any, sampler: PlainSampler) -> None:
        super().__init__(*args)
        self.sampler = sampler

    def draft(
        self,
        rows: ConfirmedRows,
        sampling_metadata: SamplingMetadata,
        *,
        num_wanted: Sequence[int],
        room: Sequence[int],
        output_token_ids: Sequence[list[int]],
    ) -> Drafted:
        """Append the rows to the layer's caches; draft behind each request's last row.

        num_wanted: drafts of each request at most, fixed before any is drawn.
        room: see deeper_rows. output_token_ids: of each request, to which its drafts
        belong while deeper ones are drawn, as in verification.
        """
        last = rows.positions[rows.last].tolist()
        room = [
            min(*each) for each in zip(room, map(add, last, num_wanted), strict=True)
        ]
        num_drafts = [min(1, count) for count in num_wanted]
        begin_s = time.perf_counter()
        hidden = self._first(rows, num_drafts)
        if not any(num_drafts):
            return Drafted((), tuple(num_drafts), ((0, _since(begin_s)),))
        metadata = _drafting(sampling_metadata)
        # For the first draft alone: what processors learn of an output they keep, and
        # drafts may be refused. So min_tokens holds stop tokens back a little longer.
        for processor in metadata.logitsprocs.all:
            processor.update_state(None)
        sampled = [self._sample(hidden, metadata)]
        passes = [(sum(num_drafts), _since(begin_s))]
        with appended(output_token_ids) as append:
            while len(sampled) < self.num_speculative_tokens:
                begin_s = time.perf_counter()
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
                    token_ids,
                    deeper.positions,
                    hidden[requests],
                    deeper.batch,
                    behind=rows.last[requests],
                )
                sampled.append(self._sample(hidden, metadata))
                passes.append((len(requests), _since(begin_s)))
        return Drafted(tuple(sampled), tuple(num_drafts), tuple(passes))

    def _first(self, rows: ConfirmedRows, num_drafts: Sequence[int]) -> Tensor:
        """The hidden states [B, H] that first drafts come from; 0 where there is none.

        Of the other requests only the keys are cached.
        """
        inputs = rows.next_ids, rows.positions, rows.hidden, rows.batch
        if all(num_drafts):
            return self.model.draft(*inputs, rows.last)
        drafting = torch.tensor(num_drafts).nonzero()[:, 0]
        found = self.model.draft(*inputs, rows.last[drafting])
        hidden = found.new_zeros(len(num_drafts), found.shape[1])
        hidden[drafting] = found
        return hidden

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


def _since(begin_s: float) -> float:
    return time.perf_counter() - begin_s
