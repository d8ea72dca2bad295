"""How many drafts are chosen: as many as pay, for each request, found by measuring.

Decoding runs in virtual time: nothing here is timed.
"""

import random
from types import SimpleNamespace

import pytest

from testing.step_model import PUBLISHED_CHANCES, StepModel, expected_tokens
from vllm_duck.spec_decode.acceptance_rates import NUM_RETRIES, RETRY_AFTER_STEPS
from vllm_duck.spec_decode.drafts import NO_TOKEN
from vllm_duck.spec_decode.gate import RETIME_AFTER, DraftGate
from vllm_duck.spec_decode.row_times import NUM_TRIALS
from vllm_duck.spec_decode.runner import StepClock


def run(gate, num_steps, *, acceptance, with_s, without_s=1.0):
    """Decode with one draft; acceptance of each request, 0 or 1. Who drafted, by step.

    with_s, without_s: a step's time if all requests draft, and if none does.
    """
    req_ids = list(acceptance)
    steps = []
    for _ in range(num_steps):
        counts = dict(zip(req_ids, gate.choose(req_ids), strict=True))
        for req_id, count in counts.items():
            if count:
                gate.observe_verified(req_id, 1, acceptance[req_id])
        num_drafts = sum(counts.values())
        share = num_drafts / len(req_ids)
        seconds = share * with_s + (1 - share) * without_s
        gate.observe_step(len(req_ids) + num_drafts, seconds)
        steps.append(counts)
    return steps


def test_both_kinds_of_steps_are_tried_first():
    steps = run(DraftGate(), 2 * NUM_TRIALS, acceptance={"a": 1}, with_s=1.5)
    assert sum(step["a"] for step in steps) == NUM_TRIALS


def test_drafts_go_on_where_they_bring_more_than_they_cost():
    steps = run(DraftGate(), 100, acceptance={"a": 1}, with_s=1.9)
    assert all(step["a"] for step in steps[2 * NUM_TRIALS :])


def test_drafts_stop_where_no_acceptance_could_pay():
    steps = run(DraftGate(), 250, acceptance={"a": 1}, with_s=2.1)
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
    steps = run(gate, 3 * RETRY_AFTER_STEPS, acceptance={"a": 1}, with_s=1.5)
    assert not any(step["a"] for step in steps[:NUM_RETRIES])
    assert all(step["a"] for step in steps[-20:])


def test_retries_of_a_hopeless_request_are_few():
    gate = DraftGate()
    steps = run(gate, 2000, acceptance={"a": 0}, with_s=1.5)
    assert 0 < sum(step["a"] for step in steps) < 0.1 * len(steps)


def test_a_new_request_expects_what_the_others_had():
    gate = DraftGate()
    for number in range(10):
        name = f"bad{number}"
        run(gate, 150, acceptance={name: 0}, with_s=1.5)
        gate.forget(name)
    steps = run(gate, 20, acceptance={"next": 0}, with_s=1.5)
    assert not any(step["next"] for step in steps)
    # Until its own retries say otherwise.
    steps = run(gate, 4 * RETRY_AFTER_STEPS, acceptance={"next": 1}, with_s=1.5)
    assert all(step["next"] for step in steps[-20:])


def test_a_grammar_that_refuses_some_drafts_does_not_keep_it_undecided():
    gate = DraftGate()
    for _ in range(100):
        counts = gate.choose(["a", "b"])
        gate.observe_verified("a", counts[0], 0)
        # The second request's draft never gets a row.
        gate.observe_step(2 + counts[0], 10.0 if counts[0] else 1.0)
    assert gate.choose(["a", "b"]) == [0, 0]


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
    assert clock.num_rows == sum(num_tokens.values())


def test_a_finished_request_leaves_nothing():
    gate = DraftGate()
    run(gate, 60, acceptance={"a": 0}, with_s=1.5)
    gate.forget("a")
    assert not gate.rates._requests


def test_nobody_to_draft_for_is_no_step():
    assert DraftGate(3).choose([]) == []


class Decoding:
    """Requests that decode in virtual time, as many drafts as the gate chooses."""

    def __init__(self, gate, model, num_reqs, *, chances=PUBLISHED_CHANCES, seed=0):
        self.gate, self.model, self.chances = gate, model, chances
        self.rng = random.Random(seed)
        self.req_ids = [str(number) for number in range(num_reqs)]
        self.counts = [0] * num_reqs

    def decode(self, num_steps):
        """Expected tokens a second, and what was chosen."""
        tokens = seconds = 0.0
        chosen = []
        for _ in range(num_steps):
            step_s = self.model.step_s(len(self.req_ids) + sum(self.counts))
            self.gate.observe_step(
                len(self.req_ids) + sum(self.counts), self._disturbed(step_s)
            )
            for req_id, count in zip(self.req_ids, self.counts, strict=True):
                self.gate.observe_verified(req_id, count, self._num_accepted(count))
            tokens += expected_tokens(self.counts, self.chances)
            self.counts = self.gate.choose(self.req_ids)
            chosen.append(self.counts)
            passes = self.model.passes_s(self.counts)
            self.gate.observe_drafting([(n, self._disturbed(s)) for n, s in passes])
            seconds += step_s + sum(pass_s for _, pass_s in passes)
        return tokens / seconds, chosen

    def _disturbed(self, seconds):
        hiccup = 1.5 if self.rng.random() < 0.02 else 1.0
        return seconds * hiccup * self.rng.lognormvariate(0, 0.03)

    def _num_accepted(self, count):
        luck = self.rng.random()
        return sum(luck < chance for chance in self.chances[:count])


def best_of(model, num_reqs, chances=PUBLISHED_CHANCES):
    return max(
        (model.tokens_a_second(count, num_reqs, chances), count) for count in range(8)
    )


@pytest.mark.parametrize("num_reqs", [1, 4, 16])
@pytest.mark.parametrize("duck_s", [4.0, 1.0, 0.3])
def test_after_200_steps_it_is_as_quick_as_the_best_number_of_drafts(duck_s, num_reqs):
    decoding = Decoding(DraftGate(7), StepModel(duck_s), num_reqs)
    decoding.decode(200)
    rate, _ = decoding.decode(500)
    assert rate >= 0.97 * best_of(decoding.model, num_reqs)[0]


def test_the_cases_differ_in_what_is_best():
    """Or the test above would ask for little."""
    best = {best_of(StepModel(d), n)[1] for d in (4.0, 1.0, 0.3) for n in (1, 4, 16)}
    assert best == {0, 1, 5, 7}


def test_it_stops_where_no_draft_is_accepted():
    chances = (0.05, *[0.0] * 6)
    decoding = Decoding(DraftGate(7), StepModel(4.0), 1, chances=chances)
    decoding.decode(200)
    _, chosen = decoding.decode(500)
    assert sum(count > 0 for (count,) in chosen) < 0.1 * len(chosen)


@pytest.mark.parametrize("duck_s", [(0.1, 4.0), (4.0, 0.1)])
def test_ducks_that_become_quicker_or_slower_are_noticed(duck_s):
    before, after = map(StepModel, duck_s)
    decoding = Decoding(DraftGate(3), before, 1)
    decoding.decode(300)
    decoding.model = after
    decoding.decode(4 * RETIME_AFTER)
    rate, _ = decoding.decode(500)
    best = max(after.tokens_a_second(n, 1, PUBLISHED_CHANCES) for n in range(4))
    assert rate >= 0.95 * best


def test_requests_come_and_go():
    """What one batch size has taught serves others."""
    decoding = Decoding(DraftGate(3), StepModel(0.3), 1)
    tokens = best = 0.0
    for _ in range(150):
        num_reqs = decoding.rng.randint(1, 8)
        decoding.req_ids = [str(number) for number in range(num_reqs)]
        decoding.counts = [0] * num_reqs
        rate, _ = decoding.decode(8)
        tokens += rate
        best += max(
            decoding.model.tokens_a_second(n, num_reqs, PUBLISHED_CHANCES)
            for n in range(4)
        )
    assert tokens >= 0.9 * best


def test_luck_with_a_few_drafts_does_not_stop_what_pays():
    gate, rng = DraftGate(), random.Random(0)
    req_ids = [str(number) for number in range(16)]
    num_drafts = 0
    for _ in range(1000):
        counts = gate.choose(req_ids)
        for req_id, count in zip(req_ids, counts, strict=True):
            if count:
                gate.observe_verified(req_id, 1, int(rng.random() < 0.85))
        seconds = 1 + 0.8 * sum(counts) / len(req_ids)
        gate.observe_step(len(req_ids) + sum(counts), seconds)
        num_drafts += sum(counts)
    assert num_drafts > 0.85 * 1000 * len(req_ids)
