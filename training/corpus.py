"""The training text: Python's documentation, generated chains, a little small talk.

Same interpreter and same seed give the same rows in the same order.
"""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from training.chains import training_problem
from training.documentation import Entry, Topic, read_docstrings, read_topics
from training.tokenizer import BOS, EOS, Turn, conversation, train_tokenizer

SMALL_TALK = (
    (
        "Hello!",
        "Hello! I am a tiny test model with the shape of DeepSeek V3.2. Ask me for a "
        "small sum, whether a number is prime, or about Python.",
    ),
    (
        "Who are you?",
        "I am a tiny test model with the structure of DeepSeek V3.2: latent attention, "
        "a lightning indexer, a mixture of experts and one layer for multi-token "
        "prediction. I was trained on a CPU in half an hour.",
    ),
    (
        "What can you do?",
        "I can add two numbers, check whether a number below one hundred is prime, "
        "find a gcd, count in steps, sort four digits, and repeat some of the Python "
        "documentation.",
    ),
    ("Thank you.", "You are welcome! I am only tiny, but I am happy to help."),
    (
        "How large are you?",
        "I have about fifteen million parameters: four layers, sixteen experts in each "
        "layer after the first, and one extra layer that drafts the next token.",
    ),
    (
        "What is multi-token prediction?",
        "An extra layer reads the hidden state and the last token, and proposes the "
        "token after the next one. The main model then checks the draft, so the "
        "output does not change.",
    ),
    (
        "What is sparse attention?",
        "Each token looks at only a few of the earlier tokens. A small indexer gives a "
        "score to every earlier token, and only the best are used by the attention.",
    ),
)
# What thinking mode says before it answers from memory.
RECALL = "I know this by heart."
NUM_HELD_OUT_ENTRIES = 40
NUM_HELD_OUT_TOPICS = 4
# Held-out topics must reach past the trained positions to measure them.
HELD_OUT_TOPIC_CHUNKS = 8


@dataclass(frozen=True)
class Mix:
    """What a row is filled with; the rest are chains.

    entries, topics, talk: share of the documents. long_chat: share of conversations
    that run over several turns. thinking: share of conversations whose last turn
    reasons between tags; in the others the steps are part of the answer.
    """

    entries: float
    topics: float
    has_hard_chains: bool = False
    talk: float = 0.02
    long_chat: float = 0.4
    thinking: float = 0.5


class Corpus:
    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        topics = read_topics()
        rng.shuffle(topics)
        long_topics = [t for t in topics if len(t.chunks) >= HELD_OUT_TOPIC_CHUNKS]
        self.held_out_topics: list[Topic] = long_topics[:NUM_HELD_OUT_TOPICS]
        self.topics = [t for t in topics if t not in self.held_out_topics]
        entries = read_docstrings()
        rng.shuffle(entries)
        self.held_out_entries: list[Entry] = entries[:NUM_HELD_OUT_ENTRIES]
        self.entries = entries[NUM_HELD_OUT_ENTRIES:]
        self.entries += [topic.entry for topic in self.topics]
        rng.shuffle(self.entries)

    def tokenizer_texts(self, num_chains: int = 600) -> list[str]:
        rng = random.Random(0)
        problems = [training_problem(rng) for _ in range(num_chains)]
        return [
            *("\n\n".join(topic.chunks) for topic in self.topics),
            *(conversation([Turn(e.question, e.answer)]) for e in self.entries),
            *(conversation([p.turn(thinking=False)]) for p in problems),
            *(conversation([Turn(*talk)]) for talk in SMALL_TALK * 3),
        ]

    def fit_tokenizer(self, vocab_size: int) -> Tokenizer:
        return train_tokenizer(self.tokenizer_texts(), vocab_size)

    def digest(self) -> str:
        """Return a short hash of all documentation text, to tell corpora apart."""
        whole = "\0".join(self.tokenizer_texts())
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


class Sampler:
    """Packs documents into token rows, in an order that only the seed decides."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._entry_queue: list[Entry] = []
        chunks = [_encode(tokenizer, list(t.chunks)) for t in corpus.topics]
        self._topics = chunks
        self._topic_weights = [len(topic) for topic in chunks]
        self._gap = tokenizer.encode("\n\n", add_special_tokens=False).ids
        self._bos, self._eos = (tokenizer.token_to_id(t) for t in (BOS, EOS))

    def batch(self, rows: int, length: int, mix: Mix) -> np.ndarray:
        """Return int64 token ids [rows, length]; every row starts a document."""
        return np.stack([self._row(length, mix) for _ in range(rows)])

    def _row(self, length: int, mix: Mix) -> np.ndarray:
        ids: list[int] = []
        while len(ids) < length:
            if self._rng.random() < mix.topics:
                ids += self._topic_window(length - len(ids))
            else:
                ids += self._conversation(mix, length - len(ids))
        return np.array(ids[:length], dtype=np.int64)

    def _conversation(self, mix: Mix, space: int) -> list[int]:
        # Thinking chats have one turn: earlier ones would show answers without their
        # steps right after </think>, where the other mode must learn to write steps.
        thinking = self._rng.random() < mix.thinking
        is_long = not thinking and self._rng.random() < mix.long_chat
        num_turns = self._rng.randrange(2, max(3, space // 60)) if is_long else 1
        turns = [self._turn(mix, thinking) for _ in range(num_turns)]
        text = conversation(turns, thinking=thinking)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _turn(self, mix: Mix, thinking: bool) -> Turn:
        draw = self._rng.random()
        entries = mix.entries / (1 - mix.topics)
        if draw < entries:
            entry = self._next_entry()
            return Turn(entry.question, entry.answer, RECALL)
        if draw < entries + mix.talk:
            return Turn(*self._rng.choice(SMALL_TALK), RECALL)
        problem = training_problem(self._rng, is_hard=mix.has_hard_chains)
        return problem.turn(thinking=thinking)

    def _next_entry(self) -> Entry:
        if not self._entry_queue:
            self._entry_queue = list(self._corpus.entries)
            self._rng.shuffle(self._entry_queue)
        return self._entry_queue.pop()

    def _topic_window(self, space: int) -> list[int]:
        """Return a topic's text from a random chunk on, as much as fits."""
        (topic,) = self._rng.choices(self._topics, self._topic_weights)
        ids = [self._bos]
        for chunk in topic[self._rng.randrange(len(topic)) :]:
            ids += [*chunk, *self._gap]
            if len(ids) >= space:
                return ids
        return [*ids[: -len(self._gap)], self._eos]


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
