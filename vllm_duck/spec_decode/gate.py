"""Chooses how many drafts pay, for each request, before they are drawn.

A step with drafts takes longer than one without: more rows for the host, more experts
for the ducks, and each draft takes a run of the MTP layer. What is measured while
serving says what each further draft adds to the time of a step (row_times.py) and to
its tokens (acceptance_rates.py); the drafts that bring most tokens a second are drawn.

The choice never depends on a draft's value, which keeps it exact: see
docs/speculation.md.
"""

from collections.abc import Sequence
from itertools import accumulate

from vllm_duck.spec_decode.acceptance_rates import AcceptanceRates
from vllm_duck.spec_decode.row_times import RowTimes

# Measured chances are raised by so much: those of a few drafts are uncertain, and a
# request that does not draft learns nothing.
_HOPE = 1.05
# Steps until a number of drafts that was not chosen is timed again, one at a time:
# contexts grow, ducks come and go.
RETIME_AFTER = 256

# [B][K]: that the first drafts of a request are all accepted.
Chances = list[list[float]]


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
        chances = self.rates.chances(req_ids)
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

    def _trial(self, chances: Chances) -> int | None:
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
        self, chances: Chances, rows: Sequence[int], is_known: Sequence[bool]
    ) -> int | None:
        """The least number that could pay if the rows that it adds took no time."""
        rates = self._rates_of_all(chances, rows)
        best_known = max(
            (rate for rate, known in zip(rates, is_known, strict=True) if known),
            default=0.0,
        )
        return next(
            (
                count
                for count, rate in enumerate(rates)
                if not is_known[count] and rate > best_known
            ),
            None,
        )

    def _rates_of_all(self, chances: Chances, rows: Sequence[int]) -> list[float]:
        """Tokens a second if all requests have 0, 1, ... K drafts."""
        num_reqs = len(chances)
        more = [_HOPE * sum(of_depth) for of_depth in zip(*chances, strict=True)]
        rates, drafting = [], [0] * self.num_drafts
        for count, tokens in enumerate(accumulate(more, initial=float(num_reqs))):
            if count:
                drafting[count - 1] = num_reqs
            passes_s = [self._pass_s(*each) for each in enumerate(drafting)]
            rates.append(tokens / self._seconds(rows[count], passes_s))
        return rates

    def _retime(self, rows: Sequence[int], is_known: Sequence[bool]) -> int | None:
        """The number whose turn it is to be timed again."""
        if self._num_choices % RETIME_AFTER == 0:
            self._retimed = self._tried.index(min(self._tried))
            self.step_times.forget(rows[self._retimed])
        elif self._retimed is not None and is_known[self._retimed]:
            self._retimed = None
        return self._retimed

    def _best(self, chances: Chances) -> list[int]:
        """The drafts that bring most tokens a second, likeliest ones first."""
        num_reqs = len(chances)
        # Equal ones by depth, so that no draft comes before the one in front of it.
        order = sorted(
            (-chance, depth, i)
            for i, of_request in enumerate(chances)
            for depth, chance in enumerate(of_request)
        )
        drafting, tokens = [0] * self.num_drafts, float(num_reqs)
        passes_s = [self._pass_s(*each) for each in enumerate(drafting)]
        best_rate, num_best = tokens / self._seconds(num_reqs, passes_s), 0
        for num_drafts, (minus_chance, depth, _) in enumerate(order, 1):
            tokens -= _HOPE * minus_chance
            drafting[depth] += 1
            passes_s[depth] = self._pass_s(depth, drafting[depth])
            rate = tokens / self._seconds(num_reqs + num_drafts, passes_s)
            if rate > best_rate:
                best_rate, num_best = rate, num_drafts
        counts = [0] * num_reqs
        for _, _, i in order[:num_best]:
            counts[i] += 1
        return counts

    def _pass_s(self, depth: int, num_drafting: int) -> float:
        """Seconds of the MTP layer's run at a depth in which so many requests draft."""
        if depth == 0:
            return self.first_times.seconds(num_drafting)
        return self.deeper_times.seconds(num_drafting) if num_drafting else 0.0

    def _seconds(self, num_rows: int, passes_s: Sequence[float]) -> float:
        """Of a step. Before anything was measured, the tokens alone count."""
        return max(self.step_times.seconds(num_rows) + sum(passes_s), 1e-9)
