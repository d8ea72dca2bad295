"""Verifies drafts by taking each request's rows in sequence, as plain decoding would.

Invariants, pinned by tests:
- A request that is greedy or has a seed takes, at every row, the token that plain
  decoding takes; a draft is accepted when it is that token. So its text does not depend
  on the drafts, nor on how requests are scheduled.
- A request that samples without a seed accepts its draft d when u * q(d) <= p(d), and
  otherwise draws from max(p - q, 0), normalised. p is what plain decoding draws from, q
  what d was drawn from. So the text's distribution does not depend on the drafts.
- Row k + 1 is looked at only when the draft of row k was accepted, with everything that
  depends on the text (penalties, min_tokens, bad words) brought up to date by it.

Rejected for seeded requests: u * q(d) <= p(d) with the request's generator. The seed
would give another text than without speculation, and another one after a preemption.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_duck.spec_decode.distributions import accepts, residual
from vllm_duck.spec_decode.drafts import NO_TOKEN, Draft
from vllm_duck.spec_decode.outputs import appended
from vllm_duck.spec_decode.plain_sampler import PlainSampler, SampledRow


@dataclass(frozen=True)
class VerifyBatch:
    """The rows of one step: each request has one, and one more per scheduled draft.

    A request's rows are consecutive. `pending` holds the drafts of requests that sample
    without a seed, scheduled or not.
    """

    scheduled: tuple[tuple[int, ...], ...]
    pending: tuple[Draft | None, ...]
    # The output so far of each request, which grows while its rows are taken.
    output_token_ids: Sequence[list[int]]

    def __post_init__(self) -> None:
        assert len(self.scheduled) == len(self.pending) == len(self.output_token_ids)
        for tokens, draft in zip(self.scheduled, self.pending, strict=True):
            assert draft is None or draft.token_ids[: len(tokens)] == tokens


@dataclass(frozen=True)
class Verified:
    """The tokens that a step takes, and the first row of each request."""

    output: SamplerOutput
    first_row: SampledRow


class DuckRejectionSampler:
    def __init__(self, sampler: PlainSampler) -> None:
        self.sampler = sampler

    def __call__(
        self, batch: VerifyBatch, logits: Tensor, metadata: SamplingMetadata
    ) -> Verified:
        """logits [rows, V] -> tokens [B, 1 + K], -1 where a request takes no more.

        K is the most drafts that a request has rows for.
        """
        num_rows = torch.tensor([1 + len(tokens) for tokens in batch.scheduled])
        first_rows = num_rows.cumsum(0) - num_rows
        sampled: list[SampledRow] = []
        taken: list[Tensor] = []
        logprobs: list[LogprobsTensors] = []
        active = list(range(len(batch.scheduled)))
        with appended(batch.output_token_ids) as append:
            for depth in range(int(num_rows.max())):
                rows = first_rows + num_rows.sub(1).clamp(max=depth)
                row = self._row(logits[rows], metadata, active, depth)
                sampled.append(row)
                token_ids = _verified(row, batch, active, depth)
                values = self.sampler.logprobs(row, token_ids, metadata)
                if values is not None:
                    logprobs.append(values)
                kept = torch.full_like(token_ids, NO_TOKEN)
                kept[active] = token_ids[active]
                taken.append(kept)
                active = _accepted(batch, active, depth, token_ids.tolist())
                for req_idx in active:
                    append(req_idx, int(token_ids[req_idx]))
        output = SamplerOutput(
            sampled_token_ids=torch.stack(taken, 1).to(torch.int32),
            logprobs_tensors=_interleave(logprobs),
        )
        return Verified(output, sampled[0])

    def _row(
        self, logits: Tensor, metadata: SamplingMetadata, active: list[int], depth: int
    ) -> SampledRow:
        """Sample one row of every request; only active requests may change state."""
        if depth == 0:
            return self.sampler(logits, metadata)
        for processor in metadata.logitsprocs.all:
            processor.update_state(None)
        generators = {i: g for i, g in metadata.generators.items() if i in active}
        with _frozen_thinking(metadata, active):
            return self.sampler(logits, replace(metadata, generators=generators))


def _verified(
    row: SampledRow, batch: VerifyBatch, active: list[int], depth: int
) -> Tensor:
    """The tokens taken, [B]: the row's, unless a draft without a seed decides."""
    found = []
    for i in active:
        draft = batch.pending[i]
        if draft is not None and depth < len(draft.token_ids):
            found.append((i, draft))
    if not found:
        return row.token_ids
    req_indices = [i for i, _ in found]
    drafted = torch.tensor([draft.token_ids[depth] for _, draft in found])
    p = row.probs(req_indices)
    q = torch.stack([draft.probs[depth] for _, draft in found])
    # fp64: p / q may be within 2^-24 of 0 or 1.
    u = torch.rand(len(found), dtype=torch.float64)
    p_drafted, q_drafted = (x.gather(1, drafted[:, None])[:, 0] for x in (p, q))
    is_accepted = accepts(u, p_drafted, q_drafted)
    replacement = torch.multinomial(residual(p, q), 1)[:, 0]
    token_ids = row.token_ids.clone()
    token_ids[req_indices] = torch.where(is_accepted, drafted, replacement)
    return token_ids


def _accepted(
    batch: VerifyBatch, active: list[int], depth: int, token_ids: list[int]
) -> list[int]:
    """Requests that took their draft and have a row behind it."""
    return [
        i
        for i in active
        if depth < len(batch.scheduled[i]) and batch.scheduled[i][depth] == token_ids[i]
    ]


def _interleave(logprobs: list[LogprobsTensors]) -> LogprobsTensors | None:
    """Logprobs by depth -> one row per entry of the [B, 1 + K] tokens."""
    if not logprobs:
        return None
    return LogprobsTensors(
        *(
            torch.stack(field, 1).flatten(0, 1)
            for field in zip(*(values[:3] for values in logprobs), strict=True)
        )
    )


@contextmanager
def _frozen_thinking(
    metadata: SamplingMetadata, except_for: list[int]
) -> Iterator[None]:
    """Keep the thinking budgets of requests that take no token at this row."""
    holder = metadata.thinking_budget_state_holder
    if holder is None:
        yield
        return
    kept = {i: dict(s) for i, s in holder._state.items() if i not in except_for}
    yield
    holder._state.update(kept)
