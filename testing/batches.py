"""Sampling batches without an engine: a few tokens, many requests."""

from types import SimpleNamespace

import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_duck.spec_decode.acceptance import DuckRejectionSampler, VerifyBatch
from vllm_duck.spec_decode.drafts import Draft
from vllm_duck.spec_decode.plain_sampler import PlainSampler


def make_metadata(num_reqs, *, temperature=1.0, top_k=None, top_p=None, **changes):
    """Every request with the same settings; temperature 0 is greedy."""
    is_greedy = temperature == 0
    zeros = torch.zeros(num_reqs)
    values = {
        "temperature": None if is_greedy else torch.full((num_reqs,), temperature),
        "all_greedy": is_greedy,
        "all_random": not is_greedy,
        "top_p": None if top_p is None else torch.full((num_reqs,), top_p),
        "top_k": None
        if top_k is None
        else torch.full((num_reqs,), top_k, dtype=torch.int32),
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": zeros + 1,
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**{**values, **changes})


def make_samplers(**options):
    plain = PlainSampler(Sampler(**options))
    return SimpleNamespace(plain=plain, verifier=DuckRejectionSampler(plain))


def make_batch(scheduled, pending=None, outputs=None):
    num_reqs = len(scheduled)
    return VerifyBatch(
        scheduled=tuple(map(tuple, scheduled)),
        pending=tuple(pending or [None] * num_reqs),
        output_token_ids=outputs or [[] for _ in range(num_reqs)],
    )


def draw_drafts(plain, logits, metadata):
    """Sample one draft for each request, as the proposer does."""
    row = plain(logits.clone(), metadata)
    probs = row.probs(list(range(len(logits))))
    tokens = row.token_ids.tolist()
    return [Draft((t,), q[None]) for t, q in zip(tokens, probs, strict=True)]
