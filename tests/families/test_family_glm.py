"""GLM-5.2 in the engine: transformers' logits, and the same bits however it is cut up.

One engine with three drafts and caches in bf16, which the oracle has none of.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from testing.answers import (
    ask,
    lanes_are,
    recording_loads,
    runner_of,
    scheduler_of,
    start,
    worker_of,
)
from testing.families.glm import KINDS, NUM_LAYERS, TOPK
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.models.cpu.step import CpuStep

pytestmark = pytest.mark.vllm

SHARED = [i for i, kind in enumerate(KINDS) if kind == "shared"]
# Of most rows: bf16 moves a row by 0.01, and another key at a near-tie of the selection
# by some hundredths. transformers' own bf16 run is no closer.
CLOSE = 0.04
WRONG = 0.06


@pytest.fixture(scope="module")
def loaded_names():
    """The tensors that the host loads, filled in when the engine starts."""
    return []


@pytest.fixture(scope="module")
def llm(engines, glm_model, loaded_names):
    with recording_loads(loaded_names):
        return start(
            glm_model,
            speculates=True,
            num_drafts=3,
            kv_cache_dtype="bfloat16",
            block_size=16,
        )


def make_ids(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 2048, (length,), generator=generator).tolist()


LONG = make_ids(12 * TOPK)
# Below, at and above index_topk, in one batch.
PROMPTS = [make_ids(n, seed=n) for n in (3, TOPK, TOPK + 1, 40, 100, 7)]


def said(llm, prompts=PROMPTS, **sampling):
    """Tokens and logprobs on a cold cache."""
    assert llm.reset_prefix_cache()
    return ask(llm, prompts, **{"max_tokens": 8, "logprobs": 3, **sampling})


@pytest.fixture(scope="module")
def expected(llm):
    """Each prompt alone, serially."""
    with lanes_are(False, llm):
        return [said(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def got(llm):
    """Teacher-forced logits of LONG, [T, V]."""
    model, seen = runner_of(llm).model, []
    forward = model.forward

    def recorded(*args, **kwargs):
        seen.append(forward(*args, **kwargs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", recorded)
        said(llm, [LONG], max_tokens=1)
    with torch.inference_mode():
        return model.compute_logits(torch.cat(seen)[: len(LONG)]).float()


def error_of(got, oracle, rows=slice(TOPK, None)):
    """Of the rows that select, by default; the median of them."""
    return float(errors_of(got, oracle.logits(LONG))[rows].median())


def errors_of(got, exact):
    return (got - exact).norm(dim=1) / exact.norm(dim=1)


def test_logits_are_those_of_transformers(got, glm_oracle):
    assert error_of(got, glm_oracle, slice(TOPK)) < 0.02
    assert error_of(got, glm_oracle) < CLOSE


def own_indexers(oracle, patch):
    for layer_idx in SHARED:
        indexer = modeling_glm_moe_dsa.GlmMoeDsaIndexer(oracle.config, layer_idx)
        for parameter in indexer.parameters():
            parameter.data.normal_(std=0.1)
        oracle.model.layers[layer_idx].self_attn.indexer = indexer.eval()


def half_split_rope(oracle, patch):
    indexer = modeling_glm_moe_dsa.GlmMoeDsaIndexer
    patch.setattr(indexer, "forward", DeepseekV32Indexer.forward)


def smaller_eps(oracle, patch):
    for module in oracle.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6


def yarn(oracle, patch):
    oracle.config.rope_parameters = {
        "rope_theta": 8e6,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    rope = modeling_glm_moe_dsa.GlmMoeDsaRotaryEmbedding(oracle.config)
    oracle.model.rotary_emb = rope


@pytest.mark.parametrize("change", [own_indexers, half_split_rope, smaller_eps, yarn])
def test_another_model_shows(got, glm_oracle, change, monkeypatch):
    change(glm_oracle.trunk, monkeypatch)
    assert error_of(got, glm_oracle) > WRONG


def test_only_layers_with_an_indexer_have_an_index_cache(llm):
    (group,) = scheduler_of(llm).kv_cache_config.kv_cache_groups
    layers = worker_of(llm).vllm_config.compilation_config.static_forward_context
    sizes = [layers[name].kv_cache.shape[-1] for name in group.layer_names]
    num_full = KINDS.count("full") + 1
    assert sorted(sizes) == [256] * num_full + [2 * (128 + 64)] * (NUM_LAYERS + 1)


def test_every_tensor_of_the_checkpoint_is_read_by_host_or_ducks(
    llm, glm_model, loaded_names
):
    checkpoint = Checkpoint(glm_model)
    is_expert = checkpoint.family.tensors.is_expert
    own = {name for name in checkpoint.tensor_names if not is_expert(name)}
    assert {name for name in own if not name.endswith("_scale_inv")} == set(
        loaded_names
    )
    assert len(loaded_names) == len(set(loaded_names))
    assert checkpoint.moe_layer_ids == (3, 4, 5, 6)


def test_lanes_and_a_mixed_batch_change_nothing(llm, expected):
    for overlaps in (False, True):
        with lanes_are(overlaps, llm):
            assert said(llm) == expected


def test_choices_that_are_not_cut_with_the_rows_show(llm, expected, monkeypatch):
    """The lanes begin with a layer that reads what a dense layer chose."""

    def uncut(step, index, batch):
        rotations = step.rotations[index]
        # Another row's: what this row does not see is not read.
        seen = batch.num_visible[:, None] - 1
        choices = step.choices[: len(rotations)].clip(0, seen).astype(np.int32)
        return CpuStep(batch, rotations, choices)

    monkeypatch.setattr(CpuStep, "lane", uncut)
    with lanes_are(True, llm):
        assert said(llm) != expected


@pytest.mark.parametrize("chunk", [5, 33])
def test_chunks_change_nothing(llm, expected, chunk, monkeypatch):
    config = scheduler_of(llm).scheduler_config
    monkeypatch.setattr(config, "long_prefill_token_threshold", chunk)
    assert said(llm) == expected


def test_a_prefix_hit_changes_nothing(llm, expected):
    said(llm, [PROMPTS[4]])
    (again,) = ask(llm, [PROMPTS[4]], max_tokens=8, logprobs=3)
    assert again == expected[4]


def test_without_drafts_it_says_the_same(llm, expected, monkeypatch):
    drafter = runner_of(llm).drafter
    draft = drafter.draft

    def none(rows, *args, num_wanted, **kwargs):
        return draft(rows, *args, num_wanted=[0] * len(num_wanted), **kwargs)

    monkeypatch.setattr(drafter, "draft", none)
    assert said(llm) == expected


def test_drafts_that_are_accepted_change_nothing(llm, expected, monkeypatch):
    """A model with random weights drafts nothing right, so the test does."""
    drafter, sequence = runner_of(llm).drafter, PROMPTS[3] + expected[3].token_ids
    draft, num_steps = drafter.draft, []

    def right(rows, *args, **kwargs):
        drafted = draft(rows, *args, **kwargs)
        num_steps.append(1)
        behind = [*sequence[int(rows.positions[rows.last][0]) + 2 :], 0, 0, 0]
        found = [
            replace(row, token_ids=torch.tensor([token_id]))
            for row, token_id in zip(drafted.rows, behind, strict=False)
        ]
        return replace(drafted, rows=tuple(found))

    monkeypatch.setattr(drafter, "draft", right)
    assert said(llm, [PROMPTS[3]]) == [expected[3]]
    assert len(num_steps) <= 3


@pytest.mark.parametrize(
    ("length", "is_shared"), [(TOPK - 1, False), (TOPK, True), (5 * TOPK, True)]
)
def test_drafts_attend_to_what_the_confirmed_row_chose(
    llm, glm_oracle, length, is_shared, monkeypatch
):
    """Where the confirmed row sees less than index_topk, drafts see all up to that."""
    prompt, drafter, steps = LONG[:length], runner_of(llm).drafter, []
    draft = drafter.draft

    def recorded(*args, **kwargs):
        steps.append(draft(*args, **kwargs))
        return steps[-1]

    monkeypatch.setattr(drafter, "draft", recorded)
    (answer,) = said(llm, [prompt], max_tokens=2)
    got = torch.stack([row.logits[0] for row in steps[0].rows])
    token_ids = [answer.token_ids[0], *steps[0].token_ids[0].tolist()[:-1]]
    right, wrong = (
        errors_of(got, glm_oracle.draft_logits(prompt, token_ids, shares_choice=shares))
        for shares in (is_shared, not is_shared)
    )
    assert right.max() < WRONG
    assert right[1:].mean() < 0.6 * wrong[1:].mean()
