"""When the engine drafts, what becomes of its drafts, and what it reports of them."""

import itertools
import random

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds

from testing.answers import ask, draft_counts, runner_of
from vllm_duck.spec_decode.draft_meter import DraftSums
from vllm_duck.spec_decode.gate import DraftGate
from vllm_duck.spec_decode.shadow import Shadow

pytestmark = pytest.mark.vllm


def test_acceptance_repeats_and_recovers_from_a_long_sequence(speculating, prompts):
    def counts(asked, **sampling):
        assert speculating.reset_prefix_cache()
        before = draft_counts(speculating)
        ask(speculating, asked, **sampling)
        after = draft_counts(speculating)
        return [new - old for new, old in zip(after, before, strict=True)]

    first = counts(prompts[:4], max_tokens=32)
    for _ in range(9):
        assert counts(prompts[:4], max_tokens=32) == first
    counts([prompts[0] * 120], max_tokens=8)
    assert counts(prompts[:4], max_tokens=32) == first


class DiceGate(DraftGate):
    """Dice say how many drafts each request has."""

    def __init__(self, num_drafts=1):
        super().__init__(num_drafts)
        self.rng = random.Random(5)

    def choose(self, req_ids):
        return [self.rng.randint(0, self.num_drafts) for _ in req_ids]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}]
)
def test_whoever_drafts_when_the_answers_are_the_same(
    speculating, drafting_more, same, monkeypatch, sampling
):
    monkeypatch.setattr(runner_of(speculating), "gate", DiceGate())
    monkeypatch.setattr(runner_of(drafting_more), "gate", DiceGate(3))
    before = draft_counts(speculating)
    same(max_tokens=40, **sampling)
    verified = draft_counts(speculating)[0] - before[0]
    assert 8 * 40 * 0.2 < verified < 8 * 40 * 0.6


def test_after_steps_without_drafts_the_next_draft_is_as_good(
    speculating, prompts, monkeypatch
):
    """The MTP layer's cache has no holes: it sees every confirmed token anyway."""
    gate = DraftGate()
    monkeypatch.setattr(runner_of(speculating), "gate", gate)
    monkeypatch.setattr(gate, "observe_step", lambda *args: None)
    steps = itertools.count()
    monkeypatch.setattr(gate, "choose", lambda ids: [int(next(steps) >= 20)] * len(ids))

    def accepted_share():
        before = draft_counts(speculating)
        ask(speculating, prompts[1:2], max_tokens=60)
        verified, accepted = (
            b - a for a, b in zip(before, draft_counts(speculating), strict=True)
        )
        return verified, accepted / verified

    num_late, late_share = accepted_share()
    num_all, share = accepted_share()
    assert num_late < num_all
    assert late_share > share - 0.1


def test_drafts_that_all_lose_their_rows_are_verified(
    speculating, prompts, monkeypatch
):
    """A grammar may refuse the draft of a lone request: then no row has a draft."""
    runner = runner_of(speculating)
    seen = []
    verify = runner.verifier.__call__

    def keep(batch, *args):
        seen.append(batch)
        return verify(batch, *args)

    take = runner.take_draft_token_ids

    def take_none():
        drafts = take()
        return drafts and DraftTokenIds(drafts.req_ids, [[] for _ in drafts.req_ids])

    monkeypatch.setattr(runner, "verifier", keep)
    monkeypatch.setattr(runner, "take_draft_token_ids", take_none)
    ask(speculating, prompts[:1], temperature=1.0, max_tokens=12)
    assert [batch.scheduled for batch in seen] == [((),)] * 12
    # Nothing was drafted for the first token.
    assert [batch.pending[0] is None for batch in seen] == [True] + [False] * 11


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_shadow_mode_reports_and_changes_no_token(
    plain, speculating, prompts, monkeypatch, temperature
):
    """Not even of requests without a seed, when both engines draw alike."""
    asked, sampling = prompts[:4], {"temperature": temperature, "max_tokens": 20}
    torch.manual_seed(6)
    expected = ask(plain, asked, **sampling)
    monkeypatch.setattr(runner_of(speculating), "shadow", Shadow())
    before = draft_counts(speculating)
    torch.manual_seed(6)
    assert ask(speculating, asked, **sampling) == expected
    assert draft_counts(speculating) == before
    (figures,) = speculating.collective_rpc("mtp_shadow_figures")
    # The first token of an answer has no draft.
    assert figures["total"]["num_tokens"] == 4 * 19
    assert len(figures["requests"]) == 4
    means = figures["total"]
    if temperature == 0:
        assert means["alpha"] == means["acceptance_rate"] == means["top1_agreement"]
    assert 0.5 < means["acceptance_rate"] < 1
    assert 0.5 < means["top1_agreement"] < 1


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_figures_count_drafts_by_depth(speculating, drafting_more, prompts, num_drafts):
    llm = drafting_more if num_drafts == 3 else speculating

    def drafts():
        (figures,) = llm.collective_rpc("step_figures")
        return DraftSums.from_figures(figures["drafts"])

    before, counted = drafts(), draft_counts(speculating)
    answers = ask(llm, prompts[:2], max_tokens=30)
    found = drafts() - before
    assert len(found.scheduled) == num_drafts
    assert list(found.scheduled) == sorted(found.scheduled, reverse=True)
    assert sum(found.accepted) > 0.3 * sum(len(said.token_ids) for said in answers)
    assert 0 < found.mtp_share < 1
    if num_drafts == 1:
        after = draft_counts(speculating)
        sums = sum(found.scheduled), sum(found.accepted)
        assert sums[0] == after[0] - counted[0]
        assert sums[1] >= after[1] - counted[1]


def test_figures_of_shadow_mode_are_empty_without_it(speculating):
    assert speculating.collective_rpc("mtp_shadow_figures") == [{}]


def test_a_prompt_of_one_token_is_padded_and_teaches_the_gate_nothing(
    speculating, plain, prompts, monkeypatch
):
    """vLLM gives it a row for a draft (-1) beside requests that draft."""
    runner, gate = runner_of(speculating), DraftGate()
    scheduled, observed = [], []
    execute = runner.execute_model

    def execute_model(output, *args, **kwargs):
        scheduled.extend(output.scheduled_spec_decode_tokens.values())
        return execute(output, *args, **kwargs)

    monkeypatch.setattr(runner, "gate", gate)
    monkeypatch.setattr(runner, "execute_model", execute_model)
    monkeypatch.setattr(gate, "choose", lambda ids: [1] * len(ids))
    monkeypatch.setattr(gate.rates, "observe", lambda *seen: observed.append(seen))
    engine, answers = speculating.llm_engine, {}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine.add_request("long", {"prompt_token_ids": prompts[0]}, params)
    for _ in range(4):
        engine.step()
    engine.add_request("short", {"prompt_token_ids": [50]}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
    assert sum(token < 0 for tokens in scheduled for token in tokens) == 1
    assert len(observed) == sum(map(len, scheduled)) - 1
    expected = [said.token_ids for said in ask(plain, [prompts[0], [50]])]
    assert [answers["long"], answers["short"]] == expected
