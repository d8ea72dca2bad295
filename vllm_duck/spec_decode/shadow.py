"""Shadow mode: what the MTP layer would have drafted, beside plain decoding.

It changes no token: drafts are compared with what the target takes, never scheduled.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.logger import init_logger

from vllm_duck.spec_decode.distributions import acceptance_rate
from vllm_duck.spec_decode.plain_sampler import SampledRow

logger = init_logger(__name__)

NUM_FINISHED_KEPT = 256


@dataclass
class AcceptanceStats:
    """Sums over the tokens that a draft was there for, at their request's settings."""

    num_tokens: int = 0
    # Whether p and q are largest at the same token.
    num_top1: int = 0
    # min(1, p / q) of the token taken; 0 where q = 0, since it was never drafted.
    alpha: float = 0.0
    # sum_y min(p, q): the chance that a draft would have been accepted.
    acceptance_rate: float = 0.0

    def add(self, p: Tensor, q: Tensor, token_id: int) -> None:
        """p, q [V]: what the target and the MTP layer would draw from."""
        p_taken, q_taken = float(p[token_id]), float(q[token_id])
        self.num_tokens += 1
        self.num_top1 += int(p.argmax() == q.argmax())
        self.alpha += min(1.0, p_taken / q_taken) if q_taken > 0 else 0.0
        self.acceptance_rate += float(acceptance_rate(p[None], q[None]))

    def means(self) -> dict[str, float]:
        count = max(self.num_tokens, 1)
        return {
            "num_tokens": self.num_tokens,
            "top1_agreement": self.num_top1 / count,
            "alpha": self.alpha / count,
            "acceptance_rate": self.acceptance_rate / count,
        }


class Shadow:
    """Owns the drafts of shadow mode and what came of them."""

    def __init__(self) -> None:
        self.total = AcceptanceStats()
        self._by_request: dict[str, AcceptanceStats] = {}
        self._finished: deque[tuple[str, AcceptanceStats]] = deque(
            maxlen=NUM_FINISHED_KEPT
        )
        self._drafted: dict[str, Tensor] = {}

    def remember(self, req_id: str, row: SampledRow, req_idx: int) -> None:
        """Keep what the MTP layer would draw the request's next token from."""
        self._drafted[req_id] = row.probs([req_idx])[0]

    def compare(self, req_id: str, row: SampledRow, req_idx: int) -> None:
        """Judge the kept draft by the token that the target took."""
        q = self._drafted.pop(req_id, None)
        if q is None:
            return
        p = row.probs([req_idx])[0]
        token_id = int(row.token_ids[req_idx])
        self._by_request.setdefault(req_id, AcceptanceStats()).add(p, q, token_id)
        self.total.add(p, q, token_id)

    def finish(self, req_id: str) -> None:
        self._drafted.pop(req_id, None)
        stats = self._by_request.pop(req_id, None)
        if stats is None:
            return
        self._finished.append((req_id, stats))
        logger.info(
            "mtp shadow: request %s %s; in total %s",
            req_id,
            _text(stats),
            _text(self.total),
        )

    def figures(self) -> dict[str, Any]:
        """Means in total and per request, the latest finished ones included."""
        requests = dict(self._finished) | self._by_request
        return {
            "total": self.total.means(),
            "requests": {req_id: found.means() for req_id, found in requests.items()},
        }


def _text(stats: AcceptanceStats) -> str:
    means = stats.means()
    return (
        f"tokens={means['num_tokens']:.0f} top1={means['top1_agreement']:.3f} "
        f"alpha={means['alpha']:.3f} acceptance={means['acceptance_rate']:.3f}"
    )
