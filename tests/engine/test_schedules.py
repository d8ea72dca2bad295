"""However requests come, wait, leave and are preempted: the tokens of plain decoding.

Each run draws other schedules; VLLM_DUCK_SCHEDULES=SEED repeats those of a failure.
Both engines are tiny: sequences of at most 64 tokens, and a KV cache that holds fewer
of them than may run at once.
"""

import itertools
import os
import random

import pytest
from vllm import SamplingParams

from testing.answers import (
    ask,
    lanes_are,
    make_prompts,
    runner_of,
    scheduler_of,
    start,
)

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 64
# By the number of drafts.
NUM_SCHEDULES = {1: 120, 4: 60}
MAX_TOKENS = 7
BLOCK_SIZE = 16
# Two caches in each of the five layers.
BLOCK_BYTES = BLOCK_SIZE * 5 * (656 + 132)
LIMITS = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 9 * BLOCK_BYTES,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 80,
}


@pytest.fixture(scope="module")
def plain(engines, tiny_model):
    return start(tiny_model, speculates=False, **LIMITS)


@pytest.fixture(scope="module")
def drafting_engines(tiny_model, plain):
    return {
        count: start(tiny_model, speculates=True, num_drafts=count, **LIMITS)
        for count in (1, 4)
    }


@pytest.fixture(params=[1, 4], ids=lambda count: f"{count} drafts")
def num_drafts(request):
    return request.param


@pytest.fixture
def speculating(num_drafts, drafting_engines):
    return drafting_engines[num_drafts]


@pytest.mark.parametrize("length", [60, 61, 62, 63])
def test_a_sequence_may_fill_the_model_s_length(plain, speculating, tiny_model, length):
    long = make_prompts(tiny_model)[-1]
    for sampling in ({}, {"temperature": 1.0, "seed": 1}):
        # One by one, and beside a short one whose drafts must not suffer.
        asked = [long[:length], long[:20]]
        expected = ask(plain, asked, max_tokens=40, **sampling)
        assert ask(speculating, asked, max_tokens=40, **sampling) == expected
        alone = ask(speculating, asked[:1], max_tokens=40, **sampling)
        assert alone == expected[:1]
        assert len(alone[0].token_ids) == MAX_MODEL_LEN - length


SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 21},
    {"temperature": 0.7, "seed": 4, "top_k": 30, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logit_bias": {40: 2.0}, "presence_penalty": 0.5},
)


def test_random_schedules_give_the_tokens_of_plain_decoding(
    plain, speculating, num_drafts, tiny_model
):
    seed = int(os.environ.get("VLLM_DUCK_SCHEDULES") or random.randrange(1 << 31))
    rng = random.Random(seed)
    jobs = _jobs(plain, tiny_model, rng)
    config = scheduler_of(speculating).scheduler_config
    preempted = _count_preemptions(speculating)
    finished = 0
    for at in range(NUM_SCHEDULES[num_drafts]):
        config.long_prefill_token_threshold = rng.choice((0, 0, 5, 16, 23))
        if rng.random() < 0.2:
            speculating.reset_prefix_cache()
        with lanes_are(at % 2 == 0, speculating):
            finished += _run(speculating, jobs, rng, f"{seed}.{at}")
    config.long_prefill_token_threshold = 0
    assert finished > NUM_SCHEDULES[num_drafts], seed
    assert len(preempted) > 4, seed
    assert len(runner_of(speculating).drafts) <= LIMITS["max_num_seqs"]


def _jobs(plain, tiny_model, rng):
    """Prompts, many of them sharing a beginning, with what plain decoding answers."""
    bases = make_prompts(tiny_model)
    prompts = [base[: rng.randrange(4, 50)] for base in bases]
    prompts += [bases[-1][:32] + base[:12] for base in bases[:4]]
    jobs = []
    for prompt in prompts:
        for sampling in SAMPLINGS:
            (said,) = ask(plain, [prompt], max_tokens=MAX_TOKENS, **sampling)
            jobs.append((prompt, sampling, said.token_ids))
    return jobs


def _run(llm, jobs, rng, name):
    """One schedule: requests join at random steps, few are aborted; counts the rest."""
    engine = llm.llm_engine
    waiting = rng.sample(jobs, rng.randrange(2, 5))
    if rng.random() < 0.5:
        # Company whose tokens nobody can foretell.
        waiting.append((waiting[0][0], {"temperature": 1.0}, None))
    running, answers, numbers = {}, {}, itertools.count()
    while waiting or engine.has_unfinished_requests():
        while waiting and (not running or rng.random() < 0.5):
            prompt, sampling, expected = waiting.pop()
            num_tokens = rng.randrange(1, MAX_TOKENS + 1)
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling)
            req_id = f"{name}.{next(numbers)}"
            engine.add_request(req_id, {"prompt_token_ids": prompt}, params)
            running[req_id] = expected and expected[:num_tokens]
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        open_ids = sorted(running.keys() - answers.keys())
        if open_ids and rng.random() < 0.03:
            aborted = rng.choice(open_ids)
            engine.abort_request([aborted])
            del running[aborted]
    for req_id, answer in answers.items():
        if running.get(req_id):
            assert answer == running[req_id], req_id
    return len(answers)


def _count_preemptions(llm):
    scheduler = scheduler_of(llm)
    preempt, preempted = scheduler._preempt_request, []

    def counted(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return preempted
