"""Token sequences to measure on: chains, documentation, and text the model never saw.

Each kind has sequences shorter and much longer than the bundled model's index_topk
of 64, so that a wrong selection cannot hide.
"""

from pathlib import Path

from tokenizers import Tokenizer

from training.chains import MAKERS, problems
from training.corpus import Corpus
from training.tokenizer import BOS, Turn, conversation

# Tokens of a long sequence: eight times index_topk and more.
LONG = 640


def teacher_forced_texts(
    model_dir: Path, num_tokens: int
) -> dict[str, list[list[int]]]:
    """Sequences of each kind, at least `num_tokens` in all."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    corpus = Corpus()
    chains = [
        problem.turn(thinking=False)
        for group in zip(
            *(problems(kind, 64, is_held_out=False) for kind in MAKERS), strict=False
        )
        for problem in group
    ]
    entries = [Turn(entry.question, entry.answer) for entry in corpus.entries]
    unseen = [Turn(entry.question, entry.answer) for entry in corpus.held_out_entries]
    topics = ["\n\n".join(topic.chunks) for topic in corpus.held_out_topics]
    return {
        "chains": _sequences(tokenizer, chains, [], num_tokens),
        "documentation": _sequences(tokenizer, entries, [], num_tokens),
        "held-out text": _sequences(tokenizer, unseen, topics, num_tokens),
    }


def _sequences(
    tokenizer: Tokenizer,
    turns: list[Turn],
    long_texts: list[str],
    num_tokens: int,
) -> list[list[int]]:
    """A third as single turns, the rest as long texts, or as long conversations."""
    found: list[list[int]] = []
    rest = list(turns)
    while _count(found) < num_tokens / 3 and rest:
        found.append(_encode(tokenizer, conversation([rest.pop(0)])))
    texts = [BOS + text for text in long_texts]
    while _count(found) < num_tokens:
        if texts:
            text = texts.pop(0)
        else:
            taken, rest = rest[:24], rest[24:]
            text = conversation(taken)
        found.append(_encode(tokenizer, text)[:LONG])
    return found


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _count(sequences: list[list[int]]) -> int:
    return sum(map(len, sequences))
