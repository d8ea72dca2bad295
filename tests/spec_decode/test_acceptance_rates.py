"""What requests may expect of their drafts, by depth."""

import numpy as np
import pytest

from vllm_duck.spec_decode.acceptance_rates import (
    NUM_RETRIES,
    RETRY_AFTER_STEPS,
    AcceptanceRates,
)


def observe(rates, accepted, num_drafts, *, req_id="a"):
    for num_accepted in accepted:
        rates.observe(req_id, num_drafts, num_accepted)


def test_a_depth_counts_only_behind_accepted_drafts():
    rates = AcceptanceRates(3)
    # Depth 1 is accepted always, depth 2 every other time, depth 3 if it is reached.
    observe(rates, [1, 3] * 200, 3)
    (chances,) = rates.chances(["a"])
    assert chances == pytest.approx([1.0, 0.5, 0.5], abs=0.05)
    assert rates.typical() == pytest.approx([1.0, 0.5, 1.0], abs=0.05)


def test_at_first_drafts_are_trusted_and_one_failure_changes_little():
    rates = AcceptanceRates(2)
    assert rates.chances(["a"]) == [[1.0, 1.0]]
    observe(rates, [0], 2)
    assert min(rates.chances(["a"])[0]) > 0.7


def test_a_new_request_expects_what_is_typical():
    rates = AcceptanceRates(1)
    observe(rates, [0] * 100, 1)
    rates.forget("a")
    assert rates.chances(["b"])[0][0] < 0.1


def test_requests_that_differ_by_luck_are_alike():
    rates = AcceptanceRates(1)
    rng = np.random.default_rng(0)
    req_ids = [str(number) for number in range(16)]
    for _ in range(100):
        for req_id in req_ids:
            rates.observe(req_id, 1, int(rng.random() < 0.8))
    chances = [first for (first,) in rates.chances(req_ids)]
    assert max(chances) - min(chances) < 0.05
    observe(rates, [0] * 60, 1, req_id="0")
    assert rates.chances(req_ids)[0][0] < 0.2


def choose(rates, num_drafts, times):
    for _ in range(times):
        rates.note_choice("a", num_drafts)


def test_after_some_tokens_a_request_is_trusted_with_one_more_draft():
    rates = AcceptanceRates(3)
    observe(rates, [1] * 100, 3)
    choose(rates, 1, RETRY_AFTER_STEPS - 1)
    assert rates.chances(["a"])[0][1] < 0.1
    choose(rates, 1, 1)
    first, second, third = rates.chances(["a"])[0]
    assert second == first
    assert third < second
    choose(rates, 2, NUM_RETRIES)
    assert rates.chances(["a"])[0][1] < 0.1


def test_a_request_keeps_the_trust_until_it_drafts():
    """Where drafts take too long, trust alone does not make them pay."""
    rates = AcceptanceRates(1)
    observe(rates, [0] * 100, 1)
    choose(rates, 0, 10 * RETRY_AFTER_STEPS)
    assert rates.chances(["a"]) == [[1.0]]
    choose(rates, 1, NUM_RETRIES)
    assert rates.chances(["a"])[0][0] < 0.1
