"""Two lanes in a real engine: bit for bit what the serial schedule gives."""

import pytest
import torch

from testing.answers import ask, lanes_are, make_prompts, runner_of, start
from vllm_duck.spec_decode.lanes import split
from vllm_duck.spec_decode.lanes.ab_trial import NUM_TRIALS
from vllm_duck.spec_decode.lanes.policy import SLOWER, LanePolicy

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llm(engines, tiny_model):
    return start(tiny_model, speculates=True, max_num_batched_tokens=256, block_size=16)


@pytest.fixture
def prompts(tiny_model):
    return make_prompts(tiny_model)


@pytest.fixture(scope="module")
def lanes(llm):
    return runner_of(llm).lanes


def _asked(llm, prompts, *, overlaps, **sampling):
    """The answers, and the trunk's hidden states of every step, in two schedules."""
    seen = []
    trunk = runner_of(llm).model.model

    def keep(module, arguments, hidden):
        seen.append(hidden.clone())

    llm.reset_prefix_cache()
    hook = trunk.register_forward_hook(keep)
    try:
        with lanes_are(overlaps, llm):
            return ask(llm, prompts, **sampling), seen
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5}, {"logprobs": 3}], ids=str
)
@pytest.mark.parametrize("company", ["alone", "together"])
def test_lanes_give_the_bits_of_the_serial_schedule(
    llm, lanes, prompts, sampling, company
):
    asked = prompts if company == "together" else prompts[-1:]
    before = lanes.meter.total.num_steps
    expected, serial = _asked(llm, asked, overlaps=False, **sampling)
    assert lanes.meter.total.num_steps == before
    got, overlapped = _asked(llm, asked, overlaps=True, **sampling)
    assert got == expected
    assert len(overlapped) == len(serial)
    for ours, theirs in zip(overlapped, serial, strict=True):
        assert torch.equal(ours, theirs)
    # Decoding pairs and prompt chunks alike; a rejected draft leaves single tokens.
    assert lanes.meter.total.num_steps - before > len(overlapped) // 2


def test_a_prefix_hit_in_the_step_that_writes_it_gives_the_same(
    llm, lanes, prompts, monkeypatch
):
    """Three requests of one step, the later two on blocks that the first writes."""
    found = []
    find = split._same_step_readers

    def keep(batch):
        found.append(find(batch))
        return found[-1]

    monkeypatch.setattr(split, "_same_step_readers", keep)
    shared = (prompts[0] * 9)[:64]
    asked = [shared + prompts[1][:23], shared + prompts[2][:5], shared[:40]]
    hits = []
    for overlaps in (False, True):
        answers, _ = _asked(llm, asked, overlaps=overlaps, max_tokens=30)
        hits.append([answer.token_ids for answer in answers])
    assert {1, 2} in found
    assert hits[0] == hits[1]


def test_the_reason_of_a_serial_step_is_counted(llm, lanes, prompts):
    before = lanes.meter.serial_steps.copy()
    _asked(llm, prompts[:1], overlaps=False, max_tokens=5)
    ask(llm, [[5]], max_tokens=1)
    counted = lanes.meter.serial_steps - before
    assert counted["overlap is off"] >= 3
    assert counted["one token"] == 1


def test_where_lanes_are_slower_steps_stay_whole(llm, lanes, prompts, monkeypatch):
    policy = lanes.policy
    monkeypatch.setattr(lanes, "policy", LanePolicy(True))
    observe = lanes.policy.times.observe

    def slower_lanes(num_rows, *, is_first, seconds):
        observe(num_rows, is_first=is_first, seconds=2.0 if is_first else 1.0)

    lanes.policy.times.observe = slower_lanes
    before = lanes.meter.serial_steps.copy(), lanes.meter.total.num_steps
    answers = ask(llm, prompts[:1], max_tokens=60)
    assert lanes.meter.serial_steps[SLOWER] - before[0][SLOWER] > NUM_TRIALS
    # The prompt, and the trials of two rows.
    assert lanes.meter.total.num_steps - before[1] == 1 + NUM_TRIALS
    monkeypatch.setattr(lanes, "policy", policy)
    expected, _ = _asked(llm, prompts[:1], overlaps=True, max_tokens=60)
    assert answers == expected


def test_the_sums_are_consistent(llm, lanes, prompts):
    before = lanes.meter.total
    _asked(llm, prompts, overlaps=True)
    step = lanes.meter.total - before
    # Of the time of the pair, the host works or waits; the rest is the schedule's own.
    assert min(step.s0_s, *step.wait_s, step.s1_s) > 0
    assert step.s0_s + sum(step.wait_s) <= step.pair_s
    assert "ratio=" in str(step)
