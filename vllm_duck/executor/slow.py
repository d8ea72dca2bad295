"""Which ducks are slow: each is measured against its peers.

All ducks get the same calls, so their latest ones are comparable whatever the load. A
duck is slow when one call in a hundred takes FACTOR times as long as at the other
ducks, in the median of those, and at least MARGIN_US longer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_duck.executor.duck import DuckStatistics

FACTOR = 3.0
# Below it, a duck that was called slow is well again.
WELL_FACTOR = 2.0
# At 58 layers a millisecond more is two thirds of a small model's step.
MARGIN_US = 1000.0
# Fewer say nothing of one in a hundred.
MIN_CALLS = 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlowDuck:
    name: str
    p99_us: float
    peers_us: float

    def __str__(self) -> str:
        return (
            f"1 % of its latest calls take {self.p99_us / 1000:.1f} ms or more, its "
            f"peers' {self.peers_us / 1000:.1f} ms"
        )


def slow_ducks(
    statistics: Sequence[DuckStatistics],
    *,
    factor: float = FACTOR,
    min_calls: int = MIN_CALLS,
) -> list[SlowDuck]:
    """Those of all ducks that are slow, in their order."""
    if len(statistics) < 2 or min(each.num_calls for each in statistics) < min_calls:
        return []
    p99_us = np.array([each.rtt_p99_us for each in statistics])
    peers_us = [float(np.median(np.delete(p99_us, i))) for i in range(len(p99_us))]
    return [
        SlowDuck(each.name, each.rtt_p99_us, peer_us)
        for each, peer_us in zip(statistics, peers_us, strict=True)
        if each.rtt_p99_us >= max(factor * peer_us, peer_us + MARGIN_US)
    ]


class SlowLog:
    """One line when a duck becomes slow, and one when it is well again."""

    def __init__(self) -> None:
        self._slow: set[str] = set()

    def look(self, statistics: Sequence[DuckStatistics]) -> frozenset[str]:
        """The names of those that are slow now."""
        for slow in slow_ducks(statistics):
            if slow.name not in self._slow:
                logger.warning("duck %s is slow: %s", slow.name, slow)
                self._slow.add(slow.name)
        still = slow_ducks(statistics, factor=WELL_FACTOR)
        for name in sorted(self._slow - {slow.name for slow in still}):
            logger.warning("duck %s is as quick as its peers again", name)
            self._slow.discard(name)
        return frozenset(self._slow)
