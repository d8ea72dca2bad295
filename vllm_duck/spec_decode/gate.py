"""Chooses how many drafts pay, for each request, before they are drawn.

A step with drafts takes longer than one without: more rows for the host, more experts
for the ducks, and each draft takes a run of the MTP layer. What is measured while
serving says what each further draft adds to the time of a step (row_times.py) and to
its tokens (acceptance_rates.py); the drafts that bring most tokens a second are drawn.

The choice never depends on a draft's value, which keeps it exact: see
docs/speculation.md.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_duck.spec_decode.acceptance_rates import AcceptanceRates
from vllm_duck.spec_decode.row_times import RowTimes

# Chances are taken for so much better than they were measured: those of a few drafts
# are uncertain, and who does not draft learns nothing.
_HOPE = 1.05
# Steps until a number of drafts that was not chosen is timed again, one at a time:
# contexts grow, ducks come and go.
RETIME_AFTER = 256

Floats = npt.NDArray[np.float64]


class DraftGate:
    """Decides how many drafts each request has in its next step.

    Shapes: B requests, K drafts at most.
    """

    def __init__(self, num_drafts: int = 1) -> None:
        self.num_drafts = num_drafts
        self.rates = AcceptanceRates(num_drafts)
        # Of a step until its tokens are taken; of the MTP layer's run over confirmed
        # rows, by the requests that draft; of one that drafts on, by the same.
        self.step_times = RowTimes()
        self.first_times = RowTimes()
        self.deeper_times = RowTimes()
        self._num_choices = 0
        # The choice at which all requests last had each number of drafts.
        self._tried = [0] * (num_drafts + 1)
        # The number of drafts that is timed again.
        self._retimed: int | None = None

    def choose(self, req_ids: Sequence[str]) -> list[int]:
        """For the requests of the next step, how many drafts each has; once a step."""
        if not req_ids:
            return []
        self._num_choices += 1
        chances = _HOPE * self.rates.chances(req_ids)
        trial = self._trial(chances)
        if trial is not None:
            counts = [trial] * len(req_ids)
        else:
            counts = self._best(chances)
            for req_id, count in zip(req_ids, counts, strict=True):
                self.rates.note_choice(req_id, count)
        if min(counts) == max(counts):
            self._tried[counts[0]] = self._num_choices
        return counts

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Record the time of a decode step of so many rows, up to its tokens."""
        self.step_times.observe(num_rows, seconds)

    def observe_drafting(self, passes: Sequence[tuple[int, float]]) -> None:
        """Record the runs of the MTP layer in one step: drafting requests, seconds."""
        (first, *deeper) = passes
        self.first_times.observe(*first)
        for each in deeper:
            self.deeper_times.observe(*each)

    def observe_verified(self, req_id: str, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a request's drafts with rows were accepted."""
        self.rates.observe(req_id, num_drafts, num_accepted)

    def forget(self, req_id: str) -> None:
        self.rates.forget(req_id)

    def _trial(self, chances: Floats) -> int | None:
        """The number of drafts that all requests should have to be timed, if any."""
        num_reqs = len(chances)
        rows = range(num_reqs, num_reqs * (self.num_drafts + 2), num_reqs)
        is_known = [self.step_times.is_known(num_rows) for num_rows in rows]
        count = None if all(is_known) else self._untimed(chances, rows, is_known)
        if count is None:
            count = self._retime(rows, is_known)
        if count is not None:
            self.step_times.ask(rows[count])
        return count

    def _untimed(
        self, chances: Floats, rows: Sequence[int], is_known: Sequence[bool]
    ) -> int | None:
        """The least number that could pay if the rows that it adds took no time."""
        num_reqs, counts = len(chances), np.arange(self.num_drafts + 1)
        tokens = num_reqs + np.append(0.0, chances.sum(0).cumsum())
        # All requests draft at every depth, or none does.
        drafting = num_reqs * (counts[:, None] > np.arange(self.num_drafts))
        rate = tokens / self._seconds(np.array(rows), drafting)
        could_pay = rate > rate[np.array(is_known)].max(initial=0.0)
        return next(
            (k for k in counts.tolist() if could_pay[k] and not is_known[k]), None
        )

    def _retime(self, rows: Sequence[int], is_known: Sequence[bool]) -> int | None:
        """The number whose turn it is to be timed again."""
        if self._num_choices % RETIME_AFTER == 0:
            self._retimed = self._tried.index(min(self._tried))
            self.step_times.forget(rows[self._retimed])
        elif self._retimed is not None and is_known[self._retimed]:
            self._retimed = None
        return self._retimed

    def _best(self, chances: Floats) -> list[int]:
        """The drafts that bring most tokens a second, likeliest ones first."""
        num_reqs = len(chances)
        by_depth = chances.T.ravel()
        # Equal ones by depth, so that no draft comes before the one in front of it.
        order = np.argsort(-by_depth, kind="stable")
        tokens = num_reqs + np.append(0.0, by_depth[order].cumsum())
        rows = np.arange(num_reqs, num_reqs + len(tokens))
        depths = order // num_reqs
        is_at = depths[:, None] == np.arange(self.num_drafts)
        drafting = np.zeros((len(tokens), self.num_drafts), np.int64)
        is_at.cumsum(0, out=drafting[1:])
        rate = tokens / self._seconds(rows, drafting)
        taken = order[: int(rate.argmax())] % num_reqs
        return [int(n) for n in np.bincount(taken, minlength=num_reqs)]

    def _seconds(
        self, rows: npt.NDArray[np.int64], drafting: npt.NDArray[np.int64]
    ) -> Floats:
        """Of steps with rows [n], in which so many requests draft at depths [n, K]."""
        seconds = self.step_times.seconds(rows) + self.first_times.seconds(
            drafting[:, 0]
        )
        deeper = drafting[:, 1:]
        if deeper.size:
            passes = self.deeper_times.seconds(deeper)
            seconds += np.where(deeper > 0, passes, 0.0).sum(1)
        # Before anything was measured, the tokens alone count.
        return np.maximum(seconds, 1e-9)
