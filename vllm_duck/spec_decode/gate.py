"""Stops drafting where it does not pay.

A step with drafts takes longer than one without: more rows for the host, more experts
for the ducks. Drafting pays for a request while the tokens of such a step, one and
those of the accepted drafts, exceed the ratio of the two step times. Times are
measured for each number of requests, accepted drafts for each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_duck.spec_decode.ab_trial import ABTrial
from vllm_duck.spec_decode.drafts import NO_TOKEN

# How fast what a request may expect follows its latest drafts.
_WEIGHT = 1 / 16
# How fast the mean over all requests follows.
_TYPICAL_WEIGHT = 1 / 32
# Drafting stops only if it seems to lose more than this factor: what a few drafts bring
# is uncertain by 0.06, and nothing is won where single requests of a batch stop.
_DOUBT = 1.04
# A request that stopped drafting tries again after so many tokens, for so many drafts.
RETRY_AFTER_TOKENS = 128
NUM_RETRIES = 8


@dataclass
class _Request:
    # Of the drafts of a step.
    num_accepted: float
    num_tokens_without: int = 0
    num_retries_left: int = 0


class DraftGate:
    """Decides whether a request's next drafts are put before the target."""

    def __init__(self, num_drafts: int = 1) -> None:
        """num_drafts: that a request has in a step."""
        self._times = ABTrial()
        self._requests: dict[str, _Request] = {}
        # Prior for a new request: the mean over all; at first, every draft is accepted.
        self._typical = float(num_drafts)

    def allowed(self, req_ids: Sequence[str]) -> list[bool]:
        """For the requests of the next step, whether each drafts; asked once a step."""
        num_reqs = len(req_ids)
        trial = self._times.next_trial(num_reqs)
        if trial is not None:
            return [trial] * num_reqs
        return [self._pays(req_id, num_reqs) for req_id in req_ids]

    def observe_step(self, num_reqs: int, num_drafting: int, seconds: float) -> None:
        """Record the time of a decode step, in which so many requests had drafts.

        It counts as a step with drafts if half of the requests or more drafted, since
        a grammar may refuse some drafts. A step with fewer teaches nothing.
        """
        if num_drafting == 0 or 2 * num_drafting >= num_reqs:
            self._times.observe(num_reqs, is_first=num_drafting > 0, seconds=seconds)

    def observe_drafts(self, req_id: str, num_accepted: int) -> None:
        """Record how many of a request's drafts in one step were accepted."""
        request = self._request(req_id)
        request.num_accepted += _WEIGHT * (num_accepted - request.num_accepted)
        self._typical += _TYPICAL_WEIGHT * (num_accepted - self._typical)

    def observe_verified(
        self, req_id: str, scheduled: Sequence[int], num_taken: int
    ) -> None:
        """Record which of a request's scheduled drafts were accepted.

        num_taken: tokens that the request took in this step. vLLM pads rows with
        NO_TOKEN, for example where a prompt of one token joins requests that draft;
        padding is no draft.
        """
        if scheduled and NO_TOKEN not in scheduled:
            self.observe_drafts(req_id, num_taken - 1)

    def forget(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def _pays(self, req_id: str, num_reqs: int) -> bool:
        request = self._request(req_id)
        worth = _DOUBT * (1 + request.num_accepted)
        if self._times.is_first_better(num_reqs, worth=worth):
            request.num_tokens_without = 0
            return True
        request.num_tokens_without += 1
        if request.num_tokens_without >= RETRY_AFTER_TOKENS:
            request.num_tokens_without = 0
            request.num_retries_left = NUM_RETRIES
        if request.num_retries_left:
            request.num_retries_left -= 1
            return True
        return False

    def _request(self, req_id: str) -> _Request:
        return self._requests.setdefault(req_id, _Request(self._typical))
