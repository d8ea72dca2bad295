"""Whatever is drafted, what comes out is distributed as the target says.

The reference is the textbook, written out below: temperature, then top-k, then top-p,
then softmax. The test is Pearson's chi-square on 100,000 draws.
"""

import functools

import numpy as np
import pytest
import torch

from testing.batches import (
    draw_drafts,
    make_batch,
    make_metadata,
    make_samplers,
)
from vllm_duck.spec_decode.drafts import Draft

NUM_DRAWS = 100_000
NUM_REQS = 20_000
TARGET = torch.tensor([1.2, 0.4, -0.3, 2.0, -1.5, 0.9, 0.0, -0.6])
DRAFT = torch.tensor([0.1, 1.4, -0.2, 1.1, 0.8, -2.0, 0.5, -0.6])
# What each token would be followed by: row t for token t.
FOLLOWING = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
# Upper 0.1 % points of the chi-square distribution, by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}

SETTINGS = [
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 0.3, "top_k": 5, "top_p": 0.9},
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)


def distribution(logits, *, temperature, top_k=None, top_p=None):
    """What a client who asks for these settings expects."""
    probs = (logits.double() / temperature).softmax(-1).numpy()
    order = np.argsort(-probs, kind="stable")
    kept = np.zeros(len(probs), bool)
    within = probs[order]
    if top_k is not None:
        within = within[:top_k] / within[:top_k].sum()
    total = 0.0
    for token, prob in zip(order, within, strict=False):
        kept[token] = True
        total += prob
        if top_p is not None and total >= top_p:
            break
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum()


def assert_distributed(counts, expected):
    """Pearson's test at p > 0.001; what must not occur has not occurred."""
    counts = np.asarray(counts)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return
    mean = expected[possible] * counts.sum()
    chi_square = ((counts[possible] - mean) ** 2 / mean).sum()
    assert chi_square < CRITICAL[possible.sum() - 1], chi_square


def verify(*, without_row=(), masked=(), **settings):
    """Draft and verify NUM_DRAWS times; returns tokens [N, 2] and the drafts [N]."""
    return _verify(without_row, masked, tuple(settings.items()))


@functools.cache
def _verify(without_row, masked, settings):
    samplers = make_samplers()
    metadata = make_metadata(NUM_REQS, **dict(settings))
    # Row 0 is the target's, row 1 + t follows the token t.
    table = torch.cat([mask(TARGET, masked)[None], FOLLOWING])
    tokens, drafted = [], []
    for _ in range(NUM_DRAWS // NUM_REQS):
        drafts = draw_drafts(samplers.plain, DRAFT.repeat(NUM_REQS, 1), metadata)
        scheduled, rows = [], []
        for draft in drafts:
            (token,) = draft.token_ids
            scheduled.append(() if token in without_row else (token,))
            rows.extend([0, *(1 + kept for kept in scheduled[-1])])
            drafted.append(token)
        batch = make_batch(scheduled, drafts)
        output = samplers.verifier(batch, table[rows], metadata).output
        tokens.append(output.sampled_token_ids)
    return torch.cat(tokens).numpy(), np.array(drafted)


def mask(logits, token_ids):
    logits = logits.clone()
    logits[list(token_ids)] = -torch.inf
    return logits


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_first_token_is_distributed_as_the_target(settings):
    tokens, _ = verify(**settings)
    counts = np.bincount(tokens[:, 0], minlength=8)
    assert_distributed(counts, distribution(TARGET, **settings))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_bonus_token_is_distributed_as_its_row(settings):
    tokens, _ = verify(**settings)
    for first in range(8):
        bonus = tokens[tokens[:, 0] == first, 1]
        bonus = bonus[bonus >= 0]
        if len(bonus) >= 5000:
            counts = np.bincount(bonus, minlength=8)
            assert_distributed(counts, distribution(FOLLOWING[first], **settings))


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_drafts_are_accepted_as_often_as_the_distributions_overlap(settings):
    tokens, drafted = verify(**settings)
    p, q = (distribution(logits, **settings) for logits in (TARGET, DRAFT))
    expected = np.minimum(p, q).sum()
    sigma = np.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert abs((tokens[:, 1] >= 0).mean() - expected) < 4 * sigma + 1e-9
    is_accepted = tokens[:, 1] >= 0
    assert (tokens[is_accepted, 0] == drafted[is_accepted]).all()


@pytest.mark.parametrize("refused", [(3,), (1, 4, 6)])
def test_drafts_that_a_grammar_refuses_do_not_bend_the_distribution(refused):
    """They get no row, since the scheduler asked the grammar first."""
    tokens, _ = verify(without_row=refused, masked=refused, temperature=1.0)
    assert_distributed(
        np.bincount(tokens[:, 0], minlength=8),
        distribution(mask(TARGET, refused), temperature=1.0),
    )


def test_drafts_that_get_no_row_by_their_value_do_not_bend_the_distribution():
    tokens, _ = verify(without_row=(1, 3, 5, 7), temperature=1.0)
    counts = np.bincount(tokens[:, 0], minlength=8)
    assert_distributed(counts, distribution(TARGET, temperature=1.0))


def test_a_greedy_request_takes_the_target_s_token_and_the_bonus_behind_it():
    samplers = make_samplers()
    best = int(TARGET.argmax())
    wrong = (best + 1) % 8
    rows = torch.stack([TARGET, FOLLOWING[best], TARGET, FOLLOWING[wrong], TARGET])
    output = samplers.verifier(
        make_batch([(best,), (wrong,), ()]), rows, make_metadata(3, temperature=0)
    ).output
    assert output.sampled_token_ids.tolist() == [
        [best, int(FOLLOWING[best].argmax())],
        [best, -1],
        [best, -1],
    ]


def _generators(*seeds):
    return {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds)}


def test_a_seeded_request_takes_what_plain_decoding_takes_whatever_is_drafted():
    samplers = make_samplers()
    for seed in range(50):
        plain = _generators(seed)
        settings = {"temperature": 1.0, "generators": plain}
        first = samplers.plain(TARGET[None].clone(), make_metadata(1, **settings))
        first_id = int(first.token_ids)
        second = samplers.plain(
            FOLLOWING[first_id][None].clone(), make_metadata(1, **settings)
        )
        for draft in range(8):
            settings = {"temperature": 1.0, "generators": _generators(seed)}
            rows = torch.stack([TARGET, FOLLOWING[draft]])
            output = samplers.verifier(
                make_batch([(draft,)]), rows, make_metadata(1, **settings)
            ).output
            rest = int(second.token_ids) if draft == first_id else -1
            assert output.sampled_token_ids.tolist() == [[first_id, rest]]


def test_a_rejected_draft_draws_once_from_the_seed():
    samplers = make_samplers()
    generators = _generators(3, 4)
    settings = {"temperature": 1.0, "generators": generators}
    samplers.verifier(
        make_batch([(0,), (1,)]), TARGET.repeat(4, 1), make_metadata(2, **settings)
    )
    reference = _generators(3, 4)
    output = samplers.verifier(
        make_batch([(), ()]),
        TARGET.repeat(2, 1),
        make_metadata(2, temperature=1.0, generators=reference),
    ).output
    for i, (token,) in enumerate(output.sampled_token_ids.tolist()):
        if token != (0, 1)[i]:
            states = [g[i].get_state() for g in (generators, reference)]
            assert torch.equal(*states)


def test_outputs_hold_the_draft_while_its_bonus_is_sampled_and_not_after():
    samplers = make_samplers()
    seen = []
    outputs = [[7], [5]]
    best = int(TARGET.argmax())

    class Spy:
        def update_state(self, batch_update):
            seen.append([list(output) for output in outputs])

        def apply(self, logits):
            return logits

        def is_argmax_invariant(self):
            return True

    from vllm.v1.sample.logits_processor import LogitsProcessors

    metadata = make_metadata(2, temperature=0, logitsprocs=LogitsProcessors([Spy()]))
    rows = torch.stack([TARGET, TARGET, TARGET])
    samplers.verifier(make_batch([(best,), ()], outputs=outputs), rows, metadata)
    assert seen == [[[7, best], [5]]]
    assert outputs == [[7], [5]]


def test_logprobs_are_those_of_the_token_taken_in_each_row():
    samplers = make_samplers()
    best = int(TARGET.argmax())
    rows = torch.stack([TARGET, FOLLOWING[best], TARGET])
    output = samplers.verifier(
        make_batch([(best,), ()]),
        rows,
        make_metadata(2, temperature=0, max_num_logprobs=1),
    ).output
    logprobs = output.logprobs_tensors
    assert logprobs.logprobs.shape == (4, 2)
    expected = torch.stack([TARGET, FOLLOWING[best], TARGET]).log_softmax(-1).amax(-1)
    torch.testing.assert_close(logprobs.logprobs[:3, 0], expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raw_logprobs", TARGET.log_softmax(-1)),
        ("raw_logits", TARGET),
        ("processed_logits", TARGET / 2),
        ("processed_logprobs", (TARGET / 2).log_softmax(-1)),
    ],
)
def test_every_logprobs_mode_reads_what_plain_decoding_reads(mode, expected):
    samplers = make_samplers(logprobs_mode=mode)
    metadata = make_metadata(1, temperature=2.0, max_num_logprobs=8)
    output = samplers.verifier(make_batch([()]), TARGET[None].clone(), metadata).output
    logprobs = output.logprobs_tensors
    by_token = torch.empty(8)
    by_token[logprobs.logprob_token_ids[0, 1:].long()] = logprobs.logprobs[0, 1:]
    torch.testing.assert_close(by_token, expected)


def test_a_draft_needs_a_distribution_for_each_token():
    with pytest.raises(AssertionError):
        Draft((1, 2), torch.ones(1, 8) / 8)
