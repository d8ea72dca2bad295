"""Several drafts a step: what the MTP layer is fed, and what it leaves behind."""

import pytest
import torch

from testing.answers import ask, make_prompts, runner_of, start
from training.attention import AttentionPlan
from training.export import read_model

pytestmark = pytest.mark.vllm

NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def llm(engines, tiny_model):
    """Caches in bf16, which the oracle has none of."""
    return start(
        tiny_model,
        speculates=True,
        num_drafts=NUM_DRAFTS,
        block_size=16,
        kv_cache_dtype="bfloat16",
    )


LENGTH = 64


@pytest.fixture(scope="module")
def short(tiny_model, llm):
    return start(
        tiny_model,
        speculates=True,
        num_drafts=NUM_DRAFTS,
        block_size=16,
        max_model_len=LENGTH,
    )


@pytest.fixture(scope="module")
def prompts(tiny_model):
    return make_prompts(tiny_model)


@pytest.fixture
def drafted(llm, monkeypatch):
    """What each step drafts, as it is drafted."""
    drafter, steps = runner_of(llm).drafter, []
    draft = drafter.draft

    def recorded(*args, **kwargs):
        steps.append(draft(*args, **kwargs))
        return steps[-1]

    monkeypatch.setattr(drafter, "draft", recorded)
    return steps


def recursion(model, prompt, token_ids, *, is_normed):
    """Logits [K, V] of the drafts behind a prompt and the token it gave, fp32.

    The layer runs over the whole sequence each time, without a cache; token_ids are the
    prompt's answer and the drafts themselves.
    """
    plan, block = AttentionPlan(), model.layers[-1]
    hidden = model.trunk(torch.tensor([prompt]), plan)
    next_ids = prompt[1:]
    found = []
    for token_id in token_ids:
        next_ids = [*next_ids, token_id]
        output = model.draft(torch.tensor([next_ids]), hidden, plan)[:, -1:]
        found.append(model.lm_head(output[0, 0]))
        if not is_normed:
            output = output / block.shared_head.norm.weight
        hidden = torch.cat([hidden, output], 1)
    return torch.stack(found)


@pytest.mark.parametrize("prompt_idx", [0, 2, 6])
@torch.no_grad()
def test_drafts_are_those_of_a_recursion_over_the_whole_sequence(
    llm, drafted, prompts, tiny_model, prompt_idx
):
    prompt = prompts[prompt_idx]
    llm.reset_prefix_cache()
    (said,) = ask(llm, [prompt], max_tokens=2)
    got = torch.stack([row.logits[0] for row in drafted[0].rows])
    assert got.shape[0] == NUM_DRAFTS
    token_ids = [said.token_ids[0], *drafted[0].token_ids[0].tolist()[:-1]]
    model = read_model(tiny_model, torch.float32)
    expected = recursion(model, prompt, token_ids, is_normed=True)
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    # Beyond index_topk another selection at a near-tie moves a draft's logits.
    is_selected = len(prompt) > model.config.index_topk
    assert errors.max() < (0.02 if is_selected else 0.01)
    # What it was before the head's norm gives other drafts.
    wrong = recursion(model, prompt, token_ids, is_normed=False)
    others = (got - wrong).norm(dim=1) / wrong.norm(dim=1)
    assert others[1:].min() > 0.01
    assert errors[1:].mean() < 0.7 * others[1:].mean()


def test_what_drafts_have_cached_is_overwritten_before_it_is_seen(
    llm, prompts, monkeypatch
):
    """NaN wherever the layer's caches hold no confirmed row, at every step."""
    drafter = runner_of(llm).drafter
    draft, caches = drafter.draft, drafter.model.caches
    (expected,) = ask(llm, prompts[2:3], max_tokens=40)
    llm.reset_prefix_cache()

    def poisoned(rows, *args, **kwargs):
        batch, num_cached = rows.batch, int(rows.positions[0])
        confirmed = torch.arange(num_cached)
        blocks = torch.tensor(batch.block_table[0])[confirmed // batch.block_size]
        slots = blocks * batch.block_size + confirmed % batch.block_size
        for cache in (caches.latent, caches.index):
            flat = cache.kv_cache.reshape(-1, cache.kv_cache.shape[-1])
            kept = flat[slots].clone()
            flat.fill_(0xFF)
            flat[slots] = kept
        return draft(rows, *args, **kwargs)

    monkeypatch.setattr(drafter, "draft", poisoned)
    assert ask(llm, prompts[2:3], max_tokens=40) == [expected]


def test_a_request_at_the_end_of_its_length_drafts_less(short, monkeypatch):
    drafter, counts = runner_of(short).drafter, []
    draft = drafter.draft

    def recorded(rows, *args, **kwargs):
        drafted = draft(rows, *args, **kwargs)
        last = rows.positions[rows.last].tolist()
        counts.extend(zip(last, drafted.num_drafts, strict=True))
        return drafted

    monkeypatch.setattr(drafter, "draft", recorded)
    ask(short, [[7] * 50], max_tokens=14)
    assert counts
    for last, num_drafts in counts:
        assert num_drafts == max(1, min(NUM_DRAFTS, LENGTH - last))
