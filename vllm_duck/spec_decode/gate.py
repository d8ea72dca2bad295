"""Where drafting does not pay, it stops.

A step with drafts takes longer than one without: more rows for the host, more experts
for the ducks. It pays for a request if the tokens that its drafts bring, 1 + acceptance
a step, are more than the time is longer. Time is measured for each number of requests,
acceptance for each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_duck.spec_decode.ab_trial import ABTrial
from vllm_duck.spec_decode.drafts import NO_TOKEN

# How fast a request's acceptance follows its latest drafts.
_WEIGHT = 1 / 16
# The same of all requests together.
_TYPICAL_WEIGHT = 1 / 32
# So much may drafting seem to lose before it stops: the acceptance of a few drafts is
# uncertain by 0.06, and where single requests of a batch stop nothing is won.
_DOUBT = 1.04
# A request that stopped drafting tries again after so many tokens, for so many drafts.
RETRY_AFTER_TOKENS = 128
NUM_RETRIES = 8


@dataclass
class _Request:
    acceptance: float
    num_tokens_without: int = 0
    num_retries_left: int = 0


class DraftGate:
    """Decides whether a request's next draft is put before the target."""

    def __init__(self) -> None:
        self._times = ABTrial()
        self._requests: dict[str, _Request] = {}
        # What a new request may expect: of the latest drafts of all. The first hopes.
        self._typical = 1.0

    def allowed(self, req_ids: Sequence[str]) -> list[bool]:
        """For the requests of the next step, whether each drafts; asked once a step."""
        num_reqs = len(req_ids)
        trial = self._times.next_trial(num_reqs)
        if trial is not None:
            return [trial] * num_reqs
        return [self._pays(req_id, num_reqs) for req_id in req_ids]

    def observe_step(self, num_reqs: int, num_drafts: int, seconds: float) -> None:
        """A step of decoding took so long.

        One in which few requests drafted teaches nothing. A grammar may refuse the
        drafts of some: if most drafted, it counts as a step with drafts.
        """
        if num_drafts == 0 or 2 * num_drafts >= num_reqs:
            self._times.observe(num_reqs, is_first=num_drafts > 0, seconds=seconds)

    def observe_draft(self, req_id: str, is_accepted: bool) -> None:
        request = self._request(req_id)
        request.acceptance += _WEIGHT * (is_accepted - request.acceptance)
        self._typical += _TYPICAL_WEIGHT * (is_accepted - self._typical)

    def observe_verified(
        self, req_id: str, scheduled: Sequence[int], num_taken: int
    ) -> None:
        """A request's drafts got rows, and it took so many tokens of the step.

        vLLM fills rows up with NO_TOKEN, for example where a prompt of one token joins
        requests that draft: nobody drafted that.
        """
        for depth, token_id in enumerate(scheduled):
            if token_id != NO_TOKEN:
                self.observe_draft(req_id, num_taken > 1 + depth)

    def forget(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def _pays(self, req_id: str, num_reqs: int) -> bool:
        request = self._request(req_id)
        worth = _DOUBT * (1 + request.acceptance)
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
