"""How long something takes by its number of rows, measured while serving."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

# Measurements kept of a number of rows; the latest ones.
_NUM_KEPT = 9
# Without so many, a number of rows is worth a trial; it is asked for at most so often,
# since a grammar may refuse the drafts that it needs.
NUM_TRIALS = 3
_MAX_ASKED = 8


@dataclass
class _Measured:
    """Numbers of rows that count as one."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    num_asked: int = 0

    @property
    def typical(self) -> tuple[float, float]:
        """Mean rows, and the lower quartile of the seconds.

        Not the median: half of a number's first steps may go the slower way of lanes
        and whole, and what disturbs a step makes it longer.
        """
        seconds = sorted(self.seconds)
        return sum(self.rows) / len(self.rows), seconds[len(seconds) // 4]


class RowTimes:
    """Seconds by rows: on a line between measured numbers, constant beyond them."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._points: dict[int, tuple[float, float]] = {}
        # The points by rows, once somebody asks.
        self._line: tuple[list[float], list[float]] | None = None

    def observe(self, num_rows: int, seconds: float) -> None:
        key = _size_class(num_rows)
        measured = self._measured.setdefault(key, _Measured())
        measured.rows.append(num_rows)
        measured.seconds.append(seconds)
        self._points[key] = measured.typical
        self._line = None

    def is_known(self, num_rows: int) -> bool:
        """Whether a trial of so many rows would teach little."""
        measured = self._measured.get(_size_class(num_rows))
        return measured is not None and (
            len(measured.seconds) >= NUM_TRIALS or measured.num_asked >= _MAX_ASKED
        )

    def ask(self, num_rows: int) -> None:
        """Note that a step was asked to have so many rows."""
        key = _size_class(num_rows)
        self._measured.setdefault(key, _Measured()).num_asked += 1

    def forget(self, num_rows: int) -> None:
        """Measure so many rows anew; until then the old figure holds."""
        self._measured.pop(_size_class(num_rows), None)

    def seconds(self, num_rows: int) -> float:
        """Of so many rows; 0 where nothing was measured."""
        if self._line is None:
            points = sorted(self._points.values())
            self._line = [rows for rows, _ in points], [s for _, s in points]
        rows, seconds = self._line
        if not rows:
            return 0.0
        at = bisect_left(rows, num_rows)
        if at in (0, len(rows)):
            return seconds[min(at, len(rows) - 1)]
        share = (num_rows - rows[at - 1]) / (rows[at] - rows[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])


def _size_class(num_rows: int) -> int:
    """Numbers below 16 by themselves, others with their neighbours: 8 an octave."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift
