"""Shadow mode's figures, on distributions small enough to add up by hand."""

import pytest
import torch

from vllm_duck.spec_decode.plain_sampler import SampledRow
from vllm_duck.spec_decode.shadow import Shadow

P = torch.tensor([0.5, 0.3, 0.2])
Q = torch.tensor([0.2, 0.7, 0.1])


def make_row(probs, token_id, *, is_greedy=False):
    return SampledRow(
        token_ids=torch.tensor([token_id]),
        logits=probs.log()[None],
        is_greedy=torch.tensor([is_greedy]),
        scores=None,
    )


def test_sampled_tokens_are_judged_by_both_distributions():
    shadow = Shadow()
    for token_id in (0, 1):
        shadow.remember("a", make_row(Q, 2), 0)
        shadow.compare("a", make_row(P, token_id), 0)
    means = shadow.figures()["total"]
    assert means["num_tokens"] == 2
    assert means["top1_agreement"] == 0
    assert means["alpha"] == pytest.approx((1 + 3 / 7) / 2)
    assert means["acceptance_rate"] == pytest.approx(0.2 + 0.3 + 0.1)


def test_a_greedy_draft_agrees_or_does_not():
    shadow = Shadow()
    for drafted in (0, 1):
        shadow.remember("a", make_row(Q, drafted, is_greedy=True), 0)
        shadow.compare("a", make_row(P, 0, is_greedy=True), 0)
    means = shadow.figures()["total"]
    assert means["top1_agreement"] == means["acceptance_rate"] == means["alpha"] == 0.5


def test_a_token_without_a_draft_is_not_counted():
    shadow = Shadow()
    shadow.compare("a", make_row(P, 0), 0)
    assert shadow.figures() == {"total": _nothing(), "requests": {}}


def test_requests_are_reported_apart_also_once_finished():
    shadow = Shadow()
    for req_id, probs in (("a", P), ("b", Q)):
        shadow.remember(req_id, make_row(P, 0), 0)
        shadow.compare(req_id, make_row(probs, 0), 0)
    shadow.finish("a")
    requests = shadow.figures()["requests"]
    assert requests["a"]["acceptance_rate"] == pytest.approx(1.0)
    assert requests["b"]["acceptance_rate"] == pytest.approx(0.6)


def _nothing():
    return {"num_tokens": 0, "top1_agreement": 0, "alpha": 0, "acceptance_rate": 0}
