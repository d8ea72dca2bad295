"""Who a duck is, in one line of text: what each of its Forward streams opens with.

A host compares the line with what it was told when it checked its ducks, and sends no
row to another one. So a duck that comes back on its port as another shard, of another
checkpoint or in another weight format is an error, not a wrong sum.
"""

from collections.abc import Iterable, Iterator

from vllm_duck.executor.duck import DuckInfo


def identity_of(info: DuckInfo) -> str:
    """The line: words like `columns=0:80`, separated by single blanks."""
    shard = info.shard
    words = {
        "protocol": info.protocol_version,
        "model": info.model_fingerprint,
        "columns": f"{shard.column_lo}:{shard.column_hi}",
        "experts": f"{shard.expert_lo}:{shard.expert_hi}",
        "layers": ",".join(_ranges(info.layer_ids)),
        "format": info.weight_format,
    }
    return " ".join(f"{name}={value}" for name, value in words.items())


def mismatch(expected: str, got: str) -> str:
    """One clause for an error: the words in which two lines differ."""
    if not got:
        return (
            f"must open its Forward stream with its identity, {expected}, and sent "
            "none; install the same vllm_duck on both"
        )
    ours, theirs = expected.split(" "), got.split(" ")
    return (
        "is not the one that this host was checked with: expected "
        f"{_without(ours, theirs)}, got {_without(theirs, ours)}; start the duck that "
        "belongs at this endpoint, or start the host again"
    )


def _without(words: list[str], others: list[str]) -> str:
    return " ".join(word for word in words if word not in others) or " ".join(words)


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    """Ascending numbers as "3-61", or "3" alone."""
    first = last = None
    for number in (*numbers, None):
        if last is not None and number == last + 1:
            last = number
            continue
        if last is not None:
            yield f"{first}" if first == last else f"{first}-{last}"
        first = last = number
