"""Three tokens in a row are distributed as the target says, whatever three drafts say.

The real drafting loop and the real verification decode thousands of requests on a
vocabulary of five; what comes next depends on the last two tokens. The reference
multiplies textbook probabilities, over all texts of three tokens. Pearson's test.

Whether a draft gets a row may depend on what was fixed before the next draft was drawn,
and on nothing later: gates of both kinds are tested, and the test finds the wrong one.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from testing.batches import make_batch, make_metadata, make_samplers
from vllm_duck.models.batch import AttentionBatch, RequestRows
from vllm_duck.spec_decode.confirmed import ConfirmedRows
from vllm_duck.spec_decode.drafts import Draft
from vllm_duck.spec_decode.proposer import DuckProposer

VOCAB = 5
NUM_REQS = 6_000
NUM_DRAFTS = 3
# No token yet.
NOTHING = VOCAB
_generator = torch.Generator().manual_seed(3)
# By the last but one and the last token.
TARGET, DRAFT = torch.randn(
    2, VOCAB + 1, VOCAB + 1, VOCAB, generator=_generator
).unbind()
PENALTIES = {"frequency": 0.4, "presence": 0.7, "repetition": 1.4}
# The token 2, and 3 behind 1.
BAD_WORDS = [[2], [1, 3]]


class DraftLayer:
    """An MTP layer whose hidden state is the last two tokens, as one number."""

    def draft(self, input_ids, positions, hidden, batch, wanted=None, behind=None):
        if wanted is not None:
            return hidden[wanted]
        last = hidden[:, 0] % (VOCAB + 1)
        return (last * (VOCAB + 1) + input_ids)[:, None].float()

    def compute_logits(self, hidden):
        return DRAFT.flatten(0, 1)[hidden[:, 0].long()].clone()


def make_proposer(sampler):
    proposer = DuckProposer.__new__(DuckProposer)
    proposer.model, proposer.sampler = DraftLayer(), sampler
    proposer.num_speculative_tokens = NUM_DRAFTS
    return proposer


def state(text):
    """The last two tokens, as one number."""
    before, last = [NOTHING, NOTHING, *text][-2:]
    return before * (VOCAB + 1) + last


def confirmed(texts):
    """A confirmed row per request, behind its text."""
    states = list(map(state, texts))
    count = len(texts)
    return ConfirmedRows(
        next_ids=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(count, dtype=torch.int64),
        hidden=torch.tensor(states)[:, None].float(),
        last=torch.arange(count),
        batch=AttentionBatch(
            (RequestRows(1, 1),) * count,
            np.zeros(count, np.int64),
            np.zeros((count, 1), np.int32),
            16,
        ),
    )


def is_allowed(state, token, grammar):
    """A grammar: no token is followed by the next two ones."""
    last = state % (VOCAB + 1)
    return not grammar or (token - last) % VOCAB not in (1, 2)


def target(grammar):
    """Logits by state."""
    mask = [
        [is_allowed(at, token, grammar) for token in range(VOCAB)]
        for at in range((VOCAB + 1) ** 2)
    ]
    return TARGET.flatten(0, 1).where(torch.tensor(mask), -torch.inf)


class Decoder:
    """All requests at once; `cut` says how many of its drafts each gets rows for."""

    def __init__(self, cut, *, grammar=False, num_wanted=None, **settings):
        self.cut, self.grammar, self.num_wanted = cut, grammar, num_wanted
        self.target = target(grammar)
        self.samplers = make_samplers()
        self.proposer = make_proposer(self.samplers.plain)
        self.settings = settings

    def texts(self):
        texts = [[] for _ in range(NUM_REQS)]
        metadata = make_metadata(NUM_REQS, output_token_ids=texts, **self.settings)
        pending = [None] * NUM_REQS
        # Each step brings a token or more.
        for _ in range(NUM_DRAFTS):
            if min(map(len, texts)) >= 3:
                break
            pending = self._drafted(texts, metadata)
            self._step(texts, pending, metadata)
        return [tuple(text[:3]) for text in texts]

    def _drafted(self, texts, metadata):
        num_wanted = [NUM_DRAFTS] * NUM_REQS
        if self.num_wanted is not None:
            num_wanted = [self.num_wanted() for _ in range(NUM_REQS)]
        drafted = self.proposer.draft(
            confirmed(texts),
            metadata,
            num_wanted=num_wanted,
            room=[16] * NUM_REQS,
            output_token_ids=texts,
        )
        everyone = list(range(NUM_REQS))
        probs = torch.stack([row.probs(everyone) for row in drafted.rows], 1)
        return [
            Draft(tuple(token_ids[:count]), probs[i, :count])
            for i, (token_ids, count) in enumerate(
                zip(drafted.token_ids.tolist(), drafted.num_drafts, strict=True)
            )
        ]

    def _step(self, texts, pending, metadata):
        scheduled, rows = [], []
        for text, draft in zip(texts, pending, strict=True):
            token_ids = draft.token_ids
            states = [state([*text, *token_ids[:n]]) for n in range(NUM_DRAFTS + 1)]
            count = self._num_scheduled(token_ids, states)
            scheduled.append(token_ids[:count])
            rows.extend(states[: count + 1])
        batch = make_batch(scheduled, pending, texts)
        output = self.samplers.verifier(batch, self.target[rows], metadata).output
        for text, taken in zip(texts, output.sampled_token_ids.tolist(), strict=True):
            text.extend(token for token in taken if token >= 0)

    def _num_scheduled(self, token_ids, states):
        """Up to the cut, or to the first draft that the grammar refuses."""
        count = min(self.cut(token_ids), len(token_ids))
        for depth in range(count):
            if not is_allowed(states[depth], token_ids[depth], self.grammar):
                return depth
        return count


def probabilities(text, *, grammar=False, is_penalised=False):
    """What comes behind the text."""
    logits = target(grammar)[state(text)].double()
    if is_penalised:
        for bad in BAD_WORDS:
            if list(text[len(text) - len(bad) + 1 :]) == bad[:-1]:
                logits[bad[-1]] = -torch.inf
        for token in set(text):
            factor = PENALTIES["repetition"]
            logits[token] *= 1 / factor if logits[token] > 0 else factor
            logits[token] -= PENALTIES["frequency"] * text.count(token)
            logits[token] -= PENALTIES["presence"]
    return logits.softmax(0)


def chi_square(decoder, **options):
    """Of the texts of three tokens; and the bound that it exceeds by chance in 0.1 %.

    Texts that are rare count as one.
    """
    texts = list(itertools.product(range(VOCAB), repeat=3))
    expected = np.array(
        [
            np.prod([probabilities(t[:n], **options)[t[n]] for n in range(3)])
            for t in texts
        ]
    )
    found = Counter(decoder.texts())
    counts = np.array([found[text] for text in texts], float)
    assert counts[expected == 0].sum() == 0
    expected *= counts.sum()
    is_rare = expected < 8
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    possible = expected > 0
    counts, expected = counts[possible], expected[possible]
    freedom = len(counts) - 1
    # Wilson and Hilferty's approximation.
    spread = 2 / (9 * freedom)
    bound = freedom * (1 - spread + 3.09 * spread**0.5) ** 3
    return ((counts - expected) ** 2 / expected).sum(), bound


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(9)


def everything(token_ids):
    return NUM_DRAFTS


def by_dice(token_ids):
    return int(torch.randint(NUM_DRAFTS + 1, ()))


def by_its_own_value(token_ids):
    """No row for a draft that is a certain token."""
    return token_ids.index(0) if 0 in token_ids else NUM_DRAFTS


def by_a_later_draft(token_ids):
    """No row for the first draft where the second is one of two tokens."""
    return 0 if token_ids[1] < 2 else NUM_DRAFTS


@pytest.mark.parametrize("cut", [everything, by_dice, by_its_own_value])
def test_three_tokens_are_distributed_as_the_target_s(cut):
    statistic, bound = chi_square(Decoder(cut))
    assert statistic < bound


def test_a_choice_made_before_drafting_changes_nothing():
    def num_wanted():
        return int(torch.randint(NUM_DRAFTS + 1, ()))

    statistic, bound = chi_square(Decoder(everything, num_wanted=num_wanted))
    assert statistic < bound


def test_a_gate_that_looks_at_later_drafts_is_found():
    statistic, bound = chi_square(Decoder(by_a_later_draft))
    assert statistic > 2 * bound


@pytest.mark.parametrize("cut", [everything, by_dice])
def test_three_tokens_of_a_grammar_are_distributed_as_the_target_s(cut):
    """Drafts that it refuses lose their rows, and those behind them."""
    statistic, bound = chi_square(Decoder(cut, grammar=True), grammar=True)
    assert statistic < bound


@pytest.mark.parametrize("cut", [everything, by_dice])
def test_penalties_and_bad_words_see_the_drafts_in_front(cut):
    every = range(NUM_REQS)
    decoder = Decoder(
        cut,
        no_penalties=False,
        prompt_token_ids=torch.full((NUM_REQS, 1), VOCAB),
        **{
            f"{name}_penalties": torch.full((NUM_REQS,), value)
            for name, value in PENALTIES.items()
        },
        bad_words_token_ids=dict.fromkeys(every, BAD_WORDS),
    )
    statistic, bound = chi_square(decoder, is_penalised=True)
    assert statistic < bound
