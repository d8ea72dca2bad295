"""How often drafts are accepted, by request and depth, and who is trusted to try again.

The rate of a depth is that of its drafts behind accepted ones: the chance that the
first j drafts are all accepted is the product of j rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

# How fast a request's rates follow its latest drafts, and the mean over all requests.
_WEIGHT = 1 / 16
_TYPICAL_WEIGHT = 1 / 32
# Before the first draft: as if so many had been accepted.
_NUM_IMAGINED = 4
# Twice the standard error of a request's rate, which follows few drafts. A smaller
# difference between two requests is luck.
_LUCK = 0.13
# A request that drafted no deeper for so many steps is trusted with one more draft, in
# so many steps.
RETRY_AFTER_STEPS = 128
NUM_RETRIES = 8


@dataclass
class _Rate:
    value: float = 1.0
    num_seen: int = _NUM_IMAGINED

    def observe(self, is_accepted: bool, least_weight: float) -> None:
        self.num_seen += 1
        weight = max(least_weight, 1 / self.num_seen)
        self.value += weight * (is_accepted - self.value)


@dataclass
class _Request:
    rates: list[_Rate]
    # Steps since it was last trusted.
    num_steps: int = 0
    # The depth at which it is, counted from 0, and for how many more drafts.
    trusted_depth: int = 0
    num_trusted: int = 0


class AcceptanceRates:
    """Owns the rates of running requests, and the typical ones."""

    def __init__(self, num_drafts: int) -> None:
        """num_drafts: the most that a request has in a step."""
        self._typical = [_Rate() for _ in range(num_drafts)]
        self._requests: dict[str, _Request] = {}

    def observe(self, req_id: str, num_drafts: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` of a request's drafts were accepted.

        Drafts behind the first one that was not say nothing.
        """
        request = self._request(req_id)
        for depth in range(min(num_drafts, num_accepted + 1)):
            is_accepted = depth < num_accepted
            request.rates[depth].observe(is_accepted, _WEIGHT)
            self._typical[depth].observe(is_accepted, _TYPICAL_WEIGHT)

    def chances(self, req_ids: Sequence[str]) -> list[list[float]]:
        """That the first j drafts are all accepted, [B][K] for j from 1 to K.

        Requests that differ by luck alone are taken for alike. One that is trusted with
        a draft is taken to have it accepted.
        """
        requests = [self._request(req_id) for req_id in req_ids]
        chances = [
            list(accumulate((rate.value for rate in request.rates), mul))
            for request in requests
        ]
        if len(requests) > 1:
            _take_luck(chances)
        for of_request, request in zip(chances, requests, strict=True):
            if request.num_trusted:
                depth = request.trusted_depth
                of_request[depth] = of_request[depth - 1] if depth else 1.0
        return chances

    def note_choice(self, req_id: str, num_drafts: int) -> None:
        """How many drafts a request has in its next step, chosen by `chances`."""
        request = self._request(req_id)
        if request.num_trusted:
            request.num_trusted -= num_drafts > request.trusted_depth
        elif num_drafts < len(request.rates):
            request.num_steps += 1
            if request.num_steps >= RETRY_AFTER_STEPS:
                self._trust(request, num_drafts)

    def forget(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def typical(self) -> list[float]:
        return [rate.value for rate in self._typical]

    def _trust(self, request: _Request, depth: int) -> None:
        """With the draft at `depth`; of those behind it nothing recent is known."""
        request.num_steps = 0
        request.trusted_depth, request.num_trusted = depth, NUM_RETRIES
        request.rates[depth + 1 :] = self._prior()[depth + 1 :]

    def _request(self, req_id: str) -> _Request:
        if req_id not in self._requests:
            self._requests[req_id] = _Request(self._prior())
        return self._requests[req_id]

    def _prior(self) -> list[_Rate]:
        return [_Rate(rate.value, rate.num_seen) for rate in self._typical]


def _take_luck(chances: list[list[float]]) -> None:
    """Move each chance by at most _LUCK to the mean of its depth."""
    means = [sum(of_depth) / len(chances) for of_depth in zip(*chances, strict=True)]
    for of_request in chances:
        for depth, mean in enumerate(means):
            off = of_request[depth] - mean
            of_request[depth] -= min(max(off, -_LUCK), _LUCK)
