"""An A/B trial of two ways to run a step: timed while serving, by size.

Both ways give the same tokens, so a trial costs no more than a few slower steps.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

# Steps of each way before a verdict; the median of five ignores a hiccup.
NUM_TRIALS = 5
# Steps until the other way is tried again: contexts grow, ducks come and go.
RETRY_AFTER = 256


class _Way:
    """Seconds of the latest steps that went one way, and when the last one was."""

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=NUM_TRIALS)
        self.last_step = 0


@dataclass
class _Record:
    """Steps of one size."""

    first: _Way = field(default_factory=_Way)
    second: _Way = field(default_factory=_Way)
    num_steps: int = 0
    retries_first: bool = False


class ABTrial:
    """Times the first and the second way; sizes above 8 are judged by powers of 2."""

    def __init__(self) -> None:
        self._records: defaultdict[int, _Record] = defaultdict(_Record)

    def next_trial(self, size: int) -> bool | None:
        """The way that the next step must go to be timed: True for the first way.

        None if neither needs a trial now. Call it once a step.
        """
        record = self._records[_size_class(size)]
        first, second = record.first, record.second
        record.num_steps += 1
        if len(first.latest) < NUM_TRIALS or len(second.latest) < NUM_TRIALS:
            return len(first.latest) <= len(second.latest)
        place = record.num_steps % RETRY_AFTER
        if place == 0:
            record.retries_first = first.last_step < second.last_step
        return record.retries_first if place < NUM_TRIALS else None

    def is_first_better(self, size: int) -> bool:
        """Whether the first way takes less time; both must have been timed."""
        record = self._records[_size_class(size)]
        return median(record.first.latest) <= median(record.second.latest)

    def observe(self, size: int, *, is_first: bool, seconds: float) -> None:
        record = self._records[_size_class(size)]
        way = record.first if is_first else record.second
        way.latest.append(seconds)
        way.last_step = record.num_steps


def _size_class(size: int) -> int:
    return size if size <= 8 else 8 + size.bit_length()
