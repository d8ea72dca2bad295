"""Which of two ways to run a step is quicker, found out by running both.

Two lanes read the host's weights twice, one for each lane; a step that stays whole
reads them once and waits for the ducks with idle hands. Which is quicker depends on the
two sides' times and on the memory they share. Both give the same tokens, so the
measurement costs nothing but the slower of a few steps.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

# Steps of each way before the choice; a median of so many shrugs one hiccup off.
NUM_TRIALS = 5
# So many steps later the other way is tried again: contexts grow, ducks come and go.
RETRY_AFTER = 256


@dataclass
class _Record:
    """What steps of one size took, seconds, the latest of each way."""

    lanes: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TRIALS))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TRIALS))
    num_steps: int = 0


class LaneChoice:
    """Decides for each size of a step by itself: sizes above 8 rows by powers of 2."""

    def __init__(self) -> None:
        self._records: defaultdict[int, _Record] = defaultdict(_Record)

    def prefers_lanes(self, num_rows: int) -> bool:
        record = self._records[_size_class(num_rows)]
        if min(len(record.lanes), len(record.whole)) < NUM_TRIALS:
            return len(record.lanes) <= len(record.whole)
        is_lanes_better = median(record.lanes) <= median(record.whole)
        is_retry = record.num_steps % RETRY_AFTER < NUM_TRIALS
        return is_lanes_better != is_retry

    def observe(self, num_rows: int, *, in_lanes: bool, seconds: float) -> None:
        record = self._records[_size_class(num_rows)]
        (record.lanes if in_lanes else record.whole).append(seconds)
        record.num_steps += 1


def _size_class(num_rows: int) -> int:
    return num_rows if num_rows <= 8 else 8 + num_rows.bit_length()
