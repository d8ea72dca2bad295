"""With duck_mtp1 a client gets what it gets without: every option, side by side.

One engine of each kind; every request goes to both. Seeded and greedy answers must be
equal to the last bit of their logprobs.
"""

import pytest
from vllm.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from testing.answers import (
    ask,
    draft_counts,
    make_prompts,
    runner_of,
    scheduler_of,
    tokens_of,
)

pytestmark = pytest.mark.vllm


def test_greedy_answers_are_equal_alone_and_in_company(
    plain, speculating, prompts, same
):
    expected = same(max_tokens=64)
    alone = [ask(speculating, [prompt], max_tokens=64)[0] for prompt in prompts]
    assert alone == expected


def test_20_answers_of_256_tokens_are_equal_at_batch_1_and_8(
    plain, speculating, tiny_model
):
    asked = make_prompts(tiny_model) + make_prompts(tiny_model, thinking=True)
    asked += [prompt[:at] for prompt, at in zip(asked, (3, 5, 7, 9), strict=False)]
    assert len(asked) == 20
    sampling = {"max_tokens": 256}
    expected = tokens_of(ask(plain, asked, **sampling))
    alone = [tokens_of(ask(speculating, [p], **sampling))[0] for p in asked]
    assert alone == expected
    by_eight = [asked[at : at + 8] for at in range(0, 20, 8)]
    together = [tokens_of(ask(speculating, group, **sampling)) for group in by_eight]
    assert sum(together, []) == expected


def test_drafts_are_verified_and_mostly_accepted(speculating, prompts):
    before = draft_counts(speculating)
    ask(speculating, prompts[:4], max_tokens=40)
    verified, accepted = (
        new - old for new, old in zip(draft_counts(speculating), before, strict=True)
    )
    assert verified > 40
    assert accepted / verified > 0.6


OPTIONS = {
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3, "logprobs": 0},
    "penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "logit_bias": {"logit_bias": {200: 6.0, 30: -50.0, 31: 3.0}},
    "bad_words": {"bad_words": ["the", " a", "digit 1", " 2"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(40, 400))},
    "seed": {"temperature": 1.0, "seed": 5, "logprobs": 1},
    "seed and min_p": {"temperature": 1.0, "seed": 5, "min_p": 0.1},
    "seed and top_k": {"temperature": 1.0, "seed": 7, "top_k": 5, "max_tokens": 32},
    "seed and top_p": {"temperature": 0.8, "seed": 7, "top_p": 0.8},
    "seed and penalties": {
        "temperature": 0.8,
        "seed": 7,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.3,
        "bad_words": ["the"],
    },
    "n": {"n": 3, "temperature": 0.9, "seed": 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sampling_options_give_the_same(same, prompts, options):
    same([*prompts[:4], prompts[-1]], **options)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
def test_an_answer_has_exactly_max_tokens(same, max_tokens):
    answers = same(max_tokens=max_tokens)
    assert {len(answer.token_ids) for answer in answers} == {max_tokens}
    assert {answer.finish_reason for answer in answers} == {"length"}


def test_eos_and_min_tokens_end_the_answers_at_the_same_place(same, prompts):
    ended = same(prompts[:5], ignore_eos=False, max_tokens=200)
    assert "stop" in {answer.finish_reason for answer in ended}
    stops = sorted({t for answer in ended for t in answer.token_ids[:40]})
    early = same(prompts[:5], ignore_eos=False, stop_token_ids=stops)
    assert {len(answer.token_ids) for answer in early} == {1}
    # Odd and even: stops become possible at a draft's row and at a bonus's.
    for min_tokens in (9, 10):
        later = same(
            prompts[:5], ignore_eos=False, min_tokens=min_tokens, stop_token_ids=stops
        )
        assert min(len(answer.token_ids) for answer in later) > min_tokens


def test_stop_strings_and_ids_end_inside_an_accepted_pair(same, speculating, prompts):
    """Each token of an answer as its stop: some are drafts, some are bonuses."""
    prompt = prompts[0]
    (whole,) = ask(speculating, [prompt], max_tokens=16)
    tokenizer = speculating.get_tokenizer()
    for token_id in whole.token_ids[1::3]:
        same([prompt], stop_token_ids=[token_id], ignore_eos=False)
        text = tokenizer.decode([token_id])
        if text.strip():
            same([prompt], stop=[text], include_stop_str_in_output=True)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}},
    "required": ["a", "b"],
}
GRAMMARS = {
    "choice": {"choice": ["yes it is", "no it is not at all", "maybe"]},
    "regex": {"regex": r"[a-f ]{5,12}\.[0-9]{2}"},
    "json": {"json": SCHEMA},
}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}], ids=str)
def test_structured_answers_are_the_same(same, prompts, grammar, sampling):
    params = StructuredOutputsParams(**grammar)
    same(
        prompts[:4],
        structured_outputs=params,
        ignore_eos=False,
        max_tokens=40,
        **sampling,
    )


def test_a_grammar_begins_where_the_reasoning_ends(same, speculating, tiny_model):
    """Also when the end of the reasoning is itself a draft."""
    asked = make_prompts(tiny_model, thinking=True)[:2]
    end_id = speculating.get_tokenizer().convert_tokens_to_ids("</think>")
    num_complete = 0
    # Raised little by little, so that it comes at odd and at even places.
    for bias in (6.0, 9.0, 12.0):
        for sampling in ({}, {"temperature": 1.0, "seed": 2}):
            answers = same(
                asked,
                structured_outputs=StructuredOutputsParams(**GRAMMARS["choice"]),
                logit_bias={end_id: bias},
                max_tokens=60,
                ignore_eos=False,
                **sampling,
            )
            for answer in answers:
                if end_id in answer.token_ids and answer.finish_reason == "stop":
                    said = answer.text.split("</think>", 1)[1]
                    assert said in GRAMMARS["choice"]["choice"]
                    num_complete += 1
    assert num_complete > 0


@pytest.mark.parametrize("budget", [0, 3, 4, 9])
def test_a_thinking_budget_ends_the_reasoning_at_the_same_token(
    same, speculating, tiny_model, budget
):
    asked = make_prompts(tiny_model, thinking=True)[:4]
    end_id = speculating.get_tokenizer().convert_tokens_to_ids("</think>")
    for sampling in ({}, {"temperature": 1.0, "seed": 8}):
        answers = same(asked, thinking_token_budget=budget, max_tokens=16, **sampling)
        for answer in answers:
            assert end_id in answer.token_ids[: budget + 2]


def test_a_lone_request_with_top_k_and_a_seed_does_not_kill_the_engine(speculating):
    """vLLM 0.32: a step without draft rows ends in an empty top-k."""
    sampling = {"temperature": 1.0, "top_k": 5, "seed": 7, "max_tokens": 32}
    (said,) = ask(speculating, [[5, 6, 7]], **sampling)
    assert len(said.token_ids) == 32


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.8}], ids=str)
def test_seeds_repeat_in_any_company(speculating, prompts, extra):
    """vLLM 0.32: the same seeded request twice gives two texts."""
    sampling = {"temperature": 1.0, "seed": 11, **extra}
    together = ask(speculating, prompts, **sampling)
    assert ask(speculating, prompts, **sampling) == together
    assert [ask(speculating, [p], **sampling)[0] for p in prompts[:3]] == together[:3]


def test_mixed_requests_in_one_batch_do_not_disturb_each_other(
    plain, speculating, prompts
):
    """Greedy, seeded and constrained ones are equal beside unseeded ones."""
    choice = StructuredOutputsParams(**GRAMMARS["choice"])
    common = {"max_tokens": 20, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1.0, **common),
        SamplingParams(temperature=0.7, seed=1, top_k=20, **common),
        SamplingParams(temperature=1.0, min_p=0.05, **common),
        SamplingParams(temperature=0, structured_outputs=choice, max_tokens=20),
        SamplingParams(temperature=0, repetition_penalty=1.2, min_tokens=5, **common),
    ]
    asked = prompts[: len(params)]
    expected = ask(plain, asked, params)
    got = ask(speculating, asked, params)
    for i in (0, 2, 4, 5):
        assert got[i] == expected[i]
    assert len(runner_of(speculating).drafts) <= 2


def test_a_stream_grows_by_pairs_and_counts_every_token(speculating, prompts):
    engine = speculating.llm_engine
    params = SamplingParams(
        temperature=0,
        max_tokens=21,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    (whole,) = ask(speculating, [prompts[0]], max_tokens=21)
    engine.add_request("stream", {"prompt_token_ids": prompts[0]}, params)
    text, pieces = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].text
            pieces.append(list(output.outputs[0].token_ids))
    assert text == whole.text
    assert sum(pieces, []) == whole.token_ids
    assert max(map(len, pieces)) == 2


def test_chunked_prompts_and_prefix_hits_change_nothing(speculating, prompts):
    """Seeds too: vLLM 0.32 on a CPU cannot take back a draw within a prompt."""
    config = scheduler_of(speculating).scheduler_config
    settings = ({"temperature": 1.0, "seed": 2}, {})
    for sampling in settings:
        assert speculating.reset_prefix_cache()
        expected = tokens_of(ask(speculating, prompts, **sampling))
        assert tokens_of(ask(speculating, prompts, **sampling)) == expected
        for chunk in (7, 33):
            assert speculating.reset_prefix_cache()
            config.long_prefill_token_threshold = chunk
            try:
                assert tokens_of(ask(speculating, prompts, **sampling)) == expected
            finally:
                config.long_prefill_token_threshold = 0
