"""The corpus is the same in every process, and held-out text stays out of it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from training.corpus import Corpus, Mix, Sampler
from training.tokenizer import BOS, SPECIAL_TOKENS, Turn, conversation

ROOT = Path(__file__).parents[2]
MIX = Mix(entries=0.3, topics=0.2)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return corpus.fit_tokenizer(vocab_size=1024)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_bare_interpreter_reads_the_same_corpus(
    corpus: Corpus, hash_seed: str
) -> None:
    code = "from training.corpus import Corpus; print(Corpus().digest())"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == corpus.digest()


def test_documentation_holds_no_memory_addresses(corpus: Corpus) -> None:
    assert not any(" at 0x" in entry.answer for entry in corpus.entries)


def test_same_seed_gives_the_same_rows(corpus: Corpus, tokenizer: Tokenizer) -> None:
    first, second = (Sampler(corpus, tokenizer, 3).batch(4, 200, MIX) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_every_row_starts_a_document(corpus: Corpus, tokenizer: Tokenizer) -> None:
    rows = Sampler(corpus, tokenizer, 3).batch(32, 100, MIX)
    assert rows.shape == (32, 100)
    assert (rows[:, 0] == SPECIAL_TOKENS.index(BOS)).all()


def test_held_out_text_is_not_trained_on(corpus: Corpus) -> None:
    trained = {entry.question for entry in corpus.entries}
    assert not trained & {entry.question for entry in corpus.held_out_entries}
    titles = {topic.title for topic in corpus.topics}
    assert not titles & {topic.title for topic in corpus.held_out_topics}


def test_every_digit_is_its_own_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("What is 1234?", add_special_tokens=False).tokens
    assert [token for token in tokens if token.isdigit()] == ["1", "2", "3", "4"]


def test_tokenizer_gives_text_back(corpus: Corpus, tokenizer: Tokenizer) -> None:
    entry = corpus.entries[0]
    text = conversation([Turn(entry.question, entry.answer)])
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
