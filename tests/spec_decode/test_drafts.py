"""A pending draft is verified once."""

import torch

from vllm_duck.spec_decode.drafts import Draft, DraftBook


def test_a_draft_is_taken_once_and_a_later_one_replaces_it():
    book = DraftBook()
    old, new = (Draft((i,), torch.ones(1, 4) / 4) for i in range(2))
    book.put("a", old)
    book.put("a", new)
    book.put("b", old)
    assert len(book) == 2
    assert book.take("a") is new
    assert book.take("a") is None
    assert len(book) == 1
