"""The MTP layer's cache holds confirmed tokens, and nothing else, bit for bit."""

import copy

import pytest
import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context

from testing.answers import (
    MTP1,
    ask,
    draft_counts,
    make_prompts,
    runner_of,
    start,
)
from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.models.loader import load_views, views_of
from vllm_duck.models.mtp import MtpDraftModel

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llm(engines, tiny_model):
    return start(tiny_model, speculates=True, block_size=16)


@pytest.fixture(scope="module")
def prompts(tiny_model):
    return make_prompts(tiny_model)


def mtp_of(llm):
    return runner_of(llm).drafter.model


def test_the_mtp_layer_s_caches_are_in_the_budget_and_come_last(llm):
    (group,) = runner_of(llm).kv_cache_config.kv_cache_groups
    mtp = mtp_of(llm)
    names = [f"{mtp.prefix}.self_attn.{kind}" for kind in ("latent", "index")]
    assert set(names) <= set(group.layer_names)
    assert len(group.layer_names) == 2 * (mtp.dims.num_hidden_layers + 1)
    sizes = {n: group.kv_cache_spec.kv_cache_specs[n].head_size for n in names}
    assert list(sizes.values()) == [656, 132]
    # vLLM drops the last block of a prefix hit for the group that registered last.
    assert list(runner_of(llm).compilation_config.static_forward_context)[-2:] == names


def test_embedding_and_head_are_the_target_s(llm):
    """The bundled checkpoint holds copies of them."""
    target = runner_of(llm).model
    assert mtp_of(llm).embed_tokens is target.model.embed_tokens
    assert mtp_of(llm).lm_head is target.lm_head


def generate(llm, prompt, num_tokens, **sampling):
    """One request; returns its tokens and the cache rows of its positions."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling)
    engine = llm.llm_engine
    assert llm.reset_prefix_cache()
    engine.add_request("cache", {"prompt_token_ids": list(prompt)}, params)
    answer = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = list(output.outputs[0].token_ids)
    runner = runner_of(llm)
    # Finished for the scheduler, but the runner only hears of it in its next step.
    (block_ids,) = list(runner.requests.values())[-1].block_ids
    layers = runner.compilation_config.static_forward_context
    tokens = [*prompt, *answer]
    rows = {}
    for name, layer in layers.items():
        if name.startswith("model.layers."):
            cache = layer.kv_cache
            block_size, row_bytes = cache.shape[-2:]
            table = torch.tensor(block_ids)[: -(-len(tokens) // block_size)]
            rows[name] = cache[table].reshape(-1, row_bytes)[: len(tokens) - 1].clone()
    return tokens, rows


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}],
    ids=str,
)
def test_the_cache_equals_one_teacher_forced_on_the_final_text(llm, prompts, sampling):
    for prompt in (prompts[2], prompts[6]):
        before = draft_counts(llm)
        tokens, rows = generate(llm, prompt, 60, **sampling)
        verified, accepted = (
            new - old for new, old in zip(draft_counts(llm), before, strict=True)
        )
        assert 0 < accepted < verified
        _, forced = generate(llm, tokens, 1, temperature=0.0)
        for name, written in rows.items():
            assert torch.equal(written, forced[name][: len(written)]), name


def test_rejected_drafts_never_reach_the_mtp_layer(llm, prompts, monkeypatch):
    """Its rows are prompt[1:] and then each token taken, at consecutive positions."""
    mtp = mtp_of(llm)
    draft = mtp.draft
    ids, positions, steps = [], [], []

    def recorded(next_ids, at, *rest):
        ids.extend(next_ids.tolist())
        positions.extend(at.tolist())
        steps.append(len(next_ids))
        return draft(next_ids, at, *rest)

    monkeypatch.setattr(mtp, "draft", recorded)
    assert llm.reset_prefix_cache()
    calls = _calls_of(llm, mtp.layer_idx, monkeypatch)
    (said,) = ask(llm, [prompts[2]], temperature=1.0, max_tokens=50)
    expected = [*prompts[2][1:], *said.token_ids]
    # The step that ends the answer may have taken one token more.
    assert len(ids) - len(expected) in (0, 1)
    assert ids[: len(expected)] == expected
    assert positions == list(range(len(ids)))
    # A step's last row drafts; the experts of the others are not asked for.
    assert max(steps) == len(prompts[2])
    assert calls == [1] * len(steps)


def _calls_of(llm, layer_idx, monkeypatch):
    """Rows of each call that the ducks get for a layer."""
    mlp = mtp_of(llm).layer.mlp
    ducks, calls = mlp.ducks, []

    class Counting:
        def send(self, request):
            assert request.layer_idx == layer_idx
            calls.append(len(request.hidden))
            return ducks.send(request)

    monkeypatch.setattr(mlp, "ducks", Counting())
    return calls


def test_the_embedding_counts_as_zero_at_position_0_only(llm):
    mtp, config = mtp_of(llm), runner_of(llm).vllm_config
    hidden = torch.randn(1, mtp.dims.hidden_size).to(torch.bfloat16)

    def run(token_id, position):
        with set_forward_context(None, config, num_tokens=1), torch.inference_mode():
            ids, positions = torch.tensor([token_id]), torch.tensor([position])
            return mtp.forward(ids, positions, hidden)[0]

    assert torch.equal(run(7, 0), run(90, 0))
    assert not torch.equal(run(7, 1), run(90, 1))


def test_an_embedding_and_a_head_of_its_own_are_kept(llm):
    mtp, target = mtp_of(llm), runner_of(llm).model
    other_embedding = copy.deepcopy(target.model.embed_tokens)
    other_head = torch.nn.Linear(4, 4)
    other_embedding.weight.data[0] += 1
    try:
        mtp.embed_tokens, mtp.lm_head = other_embedding, other_head
        mtp.share_embedding(target.model.embed_tokens)
        mtp.share_head(target.lm_head)
        assert mtp.embed_tokens is other_embedding
        assert mtp.lm_head is other_head
        mtp.embed_tokens = mtp.lm_head = None
        mtp.share_embedding(target.model.embed_tokens)
        mtp.share_head(target.lm_head)
        assert mtp.lm_head is target.lm_head
    finally:
        mtp.embed_tokens, mtp.lm_head = target.model.embed_tokens, target.lm_head


def _build(model_dir):
    """The MTP layer as the worker builds it, unloaded."""
    args = EngineArgs(model=str(model_dir), speculative_config=MTP1, max_model_len=512)
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        return MtpDraftModel(vllm_config=config)


def test_every_tensor_of_the_layer_is_required_but_the_shared_ones(
    llm, tiny_model, monkeypatch
):
    prefix = f"{mtp_of(llm).prefix}."
    needed = {
        name
        for name in Checkpoint(tiny_model).tensor_names
        if name.startswith(prefix)
        and ".experts." not in name
        and not name.endswith("_scale_inv")
    }
    own = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}
    views = views_of(_build(tiny_model))
    assert views.keys() == needed
    assert own <= needed

    class WithoutOwn(Checkpoint):
        tensor_names = Checkpoint(tiny_model).tensor_names - own

    monkeypatch.setattr("vllm_duck.models.mtp.Checkpoint", WithoutOwn)
    assert views_of(_build(tiny_model)).keys() == needed - own
    name = f"{prefix}eh_proj.weight"
    renamed = {name.replace("eh_proj", "eh_projection"): views[name]}
    with pytest.raises(DuckCheckpointError, match="eh_projection"):
        load_views(tiny_model, renamed)
