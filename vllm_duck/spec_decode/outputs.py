"""The outputs of requests, as the options that look at them see them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def appended(
    outputs: Sequence[list[int]],
) -> Iterator[Callable[[int, int], None]]:
    """Append tokens to requests' outputs for a while.

    In place: penalties, bad words and logits processors hold these very lists.
    """
    num_appended = [0] * len(outputs)

    def append(req_idx: int, token_id: int) -> None:
        outputs[req_idx].append(token_id)
        num_appended[req_idx] += 1

    try:
        yield append
    finally:
        for output, count in zip(outputs, num_appended, strict=True):
            if count:
                del output[-count:]
