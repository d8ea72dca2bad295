"""A pending draft is verified once."""

import torch

from vllm_duck.spec_decode.drafts import Draft, PendingDrafts


def test_a_draft_is_taken_once_and_a_later_one_replaces_it():
    drafts = PendingDrafts()
    old, new = (Draft((i,), torch.ones(1, 4) / 4) for i in range(2))
    drafts.put("a", old)
    drafts.put("a", new)
    drafts.put("b", old)
    assert len(drafts) == 2
    assert drafts.take("a") is new
    assert drafts.take("a") is None
    assert len(drafts) == 1
