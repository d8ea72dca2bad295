"""One token per request from one row of logits each, as plain decoding takes it.

All processing and drawing is vLLM's own `Sampler`, in its order; what it lacks is a
view of the distribution that a token was drawn from.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler


@dataclass(frozen=True)
class SampledRow:
    """What each request of a batch would take next.

    Shapes: B requests, V tokens.
        token_ids  [B]     int64
        logits     [B, V]  fp32  after every option of the request, -inf = excluded
        is_greedy  [B]     bool
        scores     [B, V]  fp32  what logprobs are read from; None = nobody asked
    """

    token_ids: Tensor
    logits: Tensor
    is_greedy: Tensor
    scores: Tensor | None

    def probs(self, req_indices: list[int]) -> Tensor:
        """The distributions that those requests take from, [len, V] fp32.

        A greedy request's is 1 at its token.
        """
        probs = self.logits[req_indices].softmax(-1, dtype=torch.float32)
        certain = torch.zeros_like(probs)
        certain.scatter_(1, self.token_ids[req_indices][:, None], 1.0)
        return torch.where(self.is_greedy[req_indices][:, None], certain, probs)


class PlainSampler:
    """Source: vLLM 0.32.0, v1/sample/sampler.py::Sampler.forward and .sample."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SampledRow:
        """logits [B, V], one row per request, overwritten."""
        metadata = replace(metadata, spec_token_ids=None)
        scores = self._raw_scores(logits, metadata)
        logits = self.sampler.apply_logits_processors(
            logits.to(torch.float32), metadata, predict_bonus_token=False
        )
        if metadata.temperature is None:
            is_greedy = torch.ones(logits.shape[0], dtype=torch.bool)
        else:
            is_greedy = metadata.temperature == 0
        token_ids, logits = self._draw(logits, metadata, is_greedy)
        processed = self._processed_scores(logits, metadata)
        return SampledRow(
            token_ids, logits, is_greedy, scores if processed is None else processed
        )

    def logprobs(
        self, row: SampledRow, token_ids: Tensor, metadata: SamplingMetadata
    ) -> LogprobsTensors | None:
        """The logprobs that clients asked for, of the tokens [B] really taken."""
        if row.scores is None:
            return None
        if metadata.logprob_token_ids:
            return self.sampler.gather_specific_token_logprobs(
                row.scores, metadata.logprob_token_ids, token_ids
            )
        assert metadata.max_num_logprobs is not None
        return self.sampler.gather_logprobs(
            row.scores, metadata.max_num_logprobs, token_ids
        )

    def _draw(
        self, logits: Tensor, metadata: SamplingMetadata, is_greedy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B], and the logits that they were drawn from."""
        greedy = None if metadata.all_random else self.sampler.greedy_sample(logits)
        if greedy is not None and metadata.all_greedy:
            return greedy.long(), logits
        assert metadata.temperature is not None
        logits = self.sampler.apply_temperature(
            logits, metadata.temperature, metadata.all_random
        )
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
        drawn, _ = self.sampler.topk_topp_sampler(
            logits, metadata.generators, None, None
        )
        if greedy is None:
            return drawn.long(), logits
        return torch.where(is_greedy, greedy.long(), drawn.long()), logits

    def _raw_scores(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor | None:
        if not _wants_scores(metadata):
            return None
        if self.sampler.logprobs_mode == "raw_logprobs":
            return self.sampler.compute_logprobs(logits)
        return logits.to(torch.float32, copy=True)

    def _processed_scores(
        self, logits: Tensor, metadata: SamplingMetadata
    ) -> Tensor | None:
        if _wants_scores(metadata):
            if self.sampler.logprobs_mode == "processed_logits":
                return logits
            if self.sampler.logprobs_mode == "processed_logprobs":
                return self.sampler.compute_logprobs(logits)
        return None


def _wants_scores(metadata: SamplingMetadata) -> bool:
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
