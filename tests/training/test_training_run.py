"""A few steps of the real loop on a small model: losses fall, seeds decide."""

import pytest
import torch
from tokenizers import Tokenizer

from training.attention import AttentionPlan
from training.config import TinyConfig
from training.corpus import Corpus, Mix, Sampler
from training.losses import reply_mask, step_losses
from training.make import budgets, parse_args
from training.model import TinyModel
from training.optimizer import Optimizer, orthogonalize
from training.schedule import ROUNDS
from training.train import Budget, train

SMALL = TinyConfig(
    vocab_size=1024,
    hidden_size=64,
    num_hidden_layers=2,
    q_lora_rank=64,
    kv_lora_rank=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    index_topk=16,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return corpus.fit_tokenizer(SMALL.vocab_size)


def _make_batch(corpus: Corpus, tokenizer: Tokenizer) -> torch.Tensor:
    mix = Mix(entries=0.2, topics=0.1)
    return torch.from_numpy(Sampler(corpus, tokenizer, 0).batch(4, 66, mix))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_three_steps_lower_every_loss(
    corpus: Corpus, tokenizer: Tokenizer, is_sparse: bool
) -> None:
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    optimizer = Optimizer(model.named_parameters())
    batch = _make_batch(corpus, tokenizer)
    seen = []
    for _ in range(4):
        plan = AttentionPlan(is_sparse=is_sparse, trains_indexer=True)
        losses = step_losses(model, batch, plan, kd_weight=0.3)
        losses.total.backward()
        optimizer.step(1.0)
        seen.append((losses.trunk, losses.draft, sum(plan.indexer_losses).item()))
    assert all(last < first for first, last in zip(seen[0], seen[-1], strict=True))


def test_same_seed_gives_the_same_weights(corpus: Corpus, tokenizer: Tokenizer) -> None:
    runs = [
        train(
            SMALL,
            corpus,
            tokenizer,
            [Budget(num_steps=2), Budget(num_steps=1)],
            seed=7,
            tokens_per_step=512,
        )
        for _ in range(2)
    ]
    states = [run.model.state_dict() for run in runs]
    assert runs[0].num_steps == 3
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_sparse_and_dense_attention_agree_up_to_index_topk() -> None:
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    token_ids = torch.randint(0, SMALL.vocab_size, (1, SMALL.index_topk + 8))
    sparse = model.trunk(token_ids, AttentionPlan(is_sparse=True))[0]
    dense = model.trunk(token_ids, AttentionPlan(is_sparse=False))[0]
    topk = SMALL.index_topk
    torch.testing.assert_close(sparse[:topk], dense[:topk])
    assert not torch.allclose(sparse[topk:], dense[topk:])


def test_draft_row_0_ignores_its_embedding() -> None:
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    hidden = torch.randn(1, 4, SMALL.hidden_size)
    first = torch.tensor([[5, 6, 7, 8]])
    drafts = [
        model.draft(token_ids, hidden, AttentionPlan())
        for token_ids in (first, first.index_fill(1, torch.tensor([0]), 9))
    ]
    assert torch.equal(drafts[0], drafts[1])


def test_expert_loop_matches_one_expert_at_a_time() -> None:
    torch.manual_seed(0)
    moe = TinyModel(SMALL).moe_layers()[0]
    x = torch.randn(50, SMALL.hidden_size, requires_grad=True)
    slow_x = x.detach().clone().requires_grad_()
    expert_ids, weights = moe.gate(slow_x)
    expected = moe.shared_experts(slow_x)
    for token, (ids, shares) in enumerate(zip(expert_ids, weights, strict=True)):
        for expert, share in zip(ids.tolist(), shares, strict=True):
            gate, up = (moe.gate_up[expert] @ slow_x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            row = torch.zeros_like(expected).index_fill(0, torch.tensor([token]), 1.0)
            expected = expected + row * share * (moe.down[expert] @ inner)
    torch.testing.assert_close(moe(x), expected)
    grads = []
    for output, source in ((moe(x), x), (expected, slow_x)):
        moe.zero_grad()
        output.square().sum().backward()
        grads.append(
            (source.grad, moe.gate_up.grad, moe.down.grad, moe.gate.weight.grad)
        )
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_only_replies_and_plain_text_are_learned() -> None:
    bos, eos, user, assistant, word = 0, 1, 3, 4, 50
    chat = [bos, user, word, assistant, word, eos, user, word, assistant, word]
    learned = [True, False, False, True, True, True, False, False, True, True]
    assert reply_mask(torch.tensor([chat])).tolist() == [learned]
    assert reply_mask(torch.full((1, 5), word)).all()


def test_orthogonalized_gradient_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 96, 32)).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_phases_cover_each_round_in_order() -> None:
    for round_ in ROUNDS:
        ends = [phase.until for phase in round_.phases]
        assert ends == sorted(ends)
        assert ends[-1] == 1.0
        assert round_.phase_at(0.0) is round_.phases[0]
        assert round_.phase_at(1.0) is round_.phases[-1]
        assert round_.rate_at(round_.decay_from, 500) == round_.peak
        assert round_.rate_at(1.0, 500) == pytest.approx(0.02 * round_.peak)


def test_minutes_are_shared_out_between_the_rounds() -> None:
    shares = [b.limit_s for b in budgets(parse_args(["out", "--minutes", "14"]))]
    assert sum(shares) == pytest.approx(14 * 60)
    assert shares[0] > shares[1]
    assert [b.num_steps for b in budgets(parse_args(["out"]))] == [
        round_.num_steps for round_ in ROUNDS
    ]


def test_steps_and_minutes_exclude_each_other() -> None:
    with pytest.raises(SystemExit):
        parse_args(["out", "--steps", "3", "--minutes", "1"])
