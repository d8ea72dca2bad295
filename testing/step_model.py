"""What steps with drafts take and bring, by a formula: decoding in virtual time.

A call's time at the ducks grows with the distinct experts of its rows, as where reading
weights is all the work. Of 256 experts each row takes 8; rows choose independently,
which is an upper bound for neighbours in a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# That the first 1, 2, ... drafts are all accepted: published of GLM-5.2 up to the
# fifth (https://github.com/InferenceMAX, SPEED-Bench coding, temperature 1).
PUBLISHED_CHANCES = (0.84, 0.66, 0.49, 0.34, 0.28, 0.17, 0.13)


def num_experts(num_rows: int) -> float:
    """Distinct experts of a call, on the average, over those of one row."""
    return 32 * (1 - (1 - 1 / 32) ** num_rows)


@dataclass(frozen=True)
class StepModel:
    """Seconds, by default those of a layer's host part."""

    # The ducks' part of a layer for one row.
    duck_s: float
    # The host's, for any few rows: it reads the same weights.
    host_s: float = 1.0
    link_s: float = 0.1
    # The LM head.
    head_s: float = 3.8
    num_layers: int = 61

    def layer_s(self, num_rows: int) -> float:
        """In two lanes or whole, whichever is quicker."""
        host_s, link_s = self.host_s, self.link_s
        whole_s = host_s + self._ducks_s(num_rows) + link_s
        if num_rows < 2:
            return whole_s
        first_s = self._ducks_s(num_rows - num_rows // 2)
        both_s = first_s + self._ducks_s(num_rows // 2)
        return min(whole_s, max(2 * host_s, both_s, host_s + first_s + link_s))

    def step_s(self, num_rows: int) -> float:
        return self.num_layers * self.layer_s(num_rows)

    def pass_s(self, num_drafting: int) -> float:
        """The MTP layer for so many requests; for none it only caches keys."""
        if not num_drafting:
            return self.host_s
        return self.host_s + self._ducks_s(num_drafting) + self.link_s + self.head_s

    def passes_s(self, counts: Sequence[int]) -> list[tuple[int, float]]:
        """The layer's runs for requests that have so many drafts each."""
        drafting = [
            sum(n > depth for n in counts) for depth in range(max(1, *counts, 0))
        ]
        return [(n, self.pass_s(n)) for n in drafting]

    def tokens_a_second(
        self, num_drafts: int, num_reqs: int, chances: Sequence[float]
    ) -> float:
        counts = [num_drafts] * num_reqs
        passes_s = sum(seconds for _, seconds in self.passes_s(counts))
        step_s = self.step_s(num_reqs + sum(counts))
        return expected_tokens(counts, chances) / (step_s + passes_s)

    def _ducks_s(self, num_rows: int) -> float:
        return self.duck_s * num_experts(num_rows)


def expected_tokens(counts: Sequence[int], chances: Sequence[float]) -> float:
    """Of a step in which requests have so many drafts each."""
    by_count = 1 + np.append(0.0, np.cumsum(chances))
    return float(by_count[list(counts)].sum())
