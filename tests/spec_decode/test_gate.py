"""When drafting stops: for a batch size, for a request, and when it resumes."""

import random
from types import SimpleNamespace

import pytest

from vllm_duck.spec_decode.ab_trial import NUM_TRIALS
from vllm_duck.spec_decode.drafts import NO_TOKEN
from vllm_duck.spec_decode.gate import NUM_RETRIES, RETRY_AFTER_TOKENS, DraftGate
from vllm_duck.spec_decode.runner import StepClock


def run(gate, num_steps, *, acceptance, with_s, without_s=1.0):
    """Decode with requests of these acceptances, 0 or 1; who drafted in each step."""
    req_ids = list(acceptance)
    steps = []
    for _ in range(num_steps):
        allowed = dict(zip(req_ids, gate.allowed(req_ids), strict=True))
        for req_id, is_allowed in allowed.items():
            if is_allowed:
                gate.observe_drafts(req_id, bool(acceptance[req_id]))
        num_drafts = sum(allowed.values())
        share = num_drafts / len(req_ids)
        seconds = share * with_s + (1 - share) * without_s
        gate.observe_step(len(req_ids), num_drafts, seconds)
        steps.append(allowed)
    return steps


def test_both_kinds_of_steps_are_tried_first():
    steps = run(DraftGate(), 2 * NUM_TRIALS, acceptance={"a": 1}, with_s=1.5)
    assert sum(step["a"] for step in steps) == NUM_TRIALS


def test_drafts_go_on_where_they_bring_more_than_they_cost():
    steps = run(DraftGate(), 100, acceptance={"a": 1}, with_s=1.9)
    assert all(step["a"] for step in steps[2 * NUM_TRIALS :])


def test_drafts_stop_where_no_acceptance_could_pay():
    steps = run(DraftGate(), 100, acceptance={"a": 1}, with_s=2.1)
    assert not any(step["a"] for step in steps[2 * NUM_TRIALS :])


def test_a_request_that_is_badly_drafted_stops_alone():
    gate = DraftGate()
    steps = run(gate, 100, acceptance={"good": 1, "bad": 0}, with_s=1.5)
    assert all(step["good"] for step in steps[2 * NUM_TRIALS :])
    assert not any(step["bad"] for step in steps[50:])


def test_a_request_tries_again_and_resumes_when_it_can():
    gate = DraftGate()
    run(gate, 60, acceptance={"a": 0}, with_s=1.5)
    # Some tokens later the text is easy; at first a few drafts find that out.
    steps = run(gate, 3 * RETRY_AFTER_TOKENS, acceptance={"a": 1}, with_s=1.5)
    assert not any(step["a"] for step in steps[:NUM_RETRIES])
    assert all(step["a"] for step in steps[-20:])


def test_retries_of_a_hopeless_request_are_few():
    gate = DraftGate()
    steps = run(gate, 2000, acceptance={"a": 0}, with_s=1.5)
    assert 0 < sum(step["a"] for step in steps) < 0.15 * len(steps)


def test_a_new_request_expects_what_the_others_had():
    gate = DraftGate()
    for number in range(10):
        name = f"bad{number}"
        run(gate, 150, acceptance={name: 0}, with_s=1.5)
        gate.forget(name)
    steps = run(gate, 20, acceptance={"next": 0}, with_s=1.5)
    assert not any(step["next"] for step in steps)
    # Until its own retries say otherwise.
    steps = run(gate, 4 * RETRY_AFTER_TOKENS, acceptance={"next": 1}, with_s=1.5)
    assert all(step["next"] for step in steps[-20:])


def test_a_grammar_that_refuses_some_drafts_does_not_keep_it_undecided():
    gate = DraftGate()
    for _ in range(100):
        allowed = gate.allowed(["a", "b"])
        gate.observe_drafts("a", True)
        # The second request's draft never gets a row.
        gate.observe_step(2, int(allowed[0]), 10.0 if allowed[0] else 1.0)
    assert gate.allowed(["a", "b"]) == [False, False]


def test_rows_that_vllm_pads_are_no_drafts():
    gate = DraftGate()
    gate.observe_verified("a", (NO_TOKEN,), 1)
    assert gate._typical == 1
    gate.observe_verified("a", (7,), 1)
    assert gate._typical < 1


def _scheduled(num_tokens, drafts):
    return SimpleNamespace(
        num_scheduled_tokens=num_tokens,
        total_num_scheduled_tokens=sum(num_tokens.values()),
        scheduled_spec_decode_tokens=drafts,
    )


@pytest.mark.parametrize(
    ("num_tokens", "drafts", "is_decoding"),
    [
        ({"a": 2, "b": 1}, {"a": [7]}, True),
        ({"a": 2, "b": 5}, {"a": [7]}, False),
        # A prompt of one token beside a request that drafts: vLLM pads it.
        ({"a": 2, "b": 2}, {"a": [7], "b": [NO_TOKEN]}, False),
    ],
)
def test_only_steps_of_decoding_are_timed(num_tokens, drafts, is_decoding):
    clock = StepClock.start(_scheduled(num_tokens, drafts))
    assert clock.is_decoding == is_decoding


def test_a_finished_request_leaves_nothing():
    gate = DraftGate()
    run(gate, 60, acceptance={"a": 0}, with_s=1.5)
    gate.forget("a")
    assert not gate._requests


def test_luck_with_a_few_drafts_does_not_stop_what_pays():
    gate, rng = DraftGate(), random.Random(0)
    req_ids = [str(number) for number in range(16)]
    num_drafts = 0
    for _ in range(1000):
        allowed = gate.allowed(req_ids)
        for req_id, is_allowed in zip(req_ids, allowed, strict=True):
            if is_allowed:
                gate.observe_drafts(req_id, rng.random() < 0.85)
        seconds = 1 + 0.8 * sum(allowed) / len(req_ids)
        gate.observe_step(len(req_ids), sum(allowed), seconds)
        num_drafts += sum(allowed)
    assert num_drafts > 0.85 * 1000 * len(req_ids)
