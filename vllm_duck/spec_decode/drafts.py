"""Drafts that wait for their verification, kept per request."""

from dataclasses import dataclass

from torch import Tensor

# Where there is no token: in what a request takes, and in a row that vLLM pads.
NO_TOKEN = -1


@dataclass(frozen=True)
class Draft:
    """The tokens drafted for one request, and what they were drawn from.

    Shapes: K drafts. probs [K, V] fp32, rows sum to 1.
    """

    token_ids: tuple[int, ...]
    probs: Tensor

    def __post_init__(self) -> None:
        assert self.probs.shape[0] == len(self.token_ids)


class PendingDrafts:
    """Owns the pending draft of each request that samples without a seed.

    A draft is verified exactly once, at the request's next sampled token, however many
    steps later that is and whether or not the scheduler gave the draft a row: the first
    drafted token needs only the row before it. So the outcome never depends on why a
    draft got no row (a grammar that refuses it, a preemption, the token budget), which
    is what keeps the output's distribution the target's own.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Draft] = {}

    def put(self, req_id: str, draft: Draft) -> None:
        self._pending[req_id] = draft

    def take(self, req_id: str) -> Draft | None:
        return self._pending.pop(req_id, None)

    def __len__(self) -> int:
        return len(self._pending)
