"""One request in flight of grpcio's client, and the wait for its reply."""

import math
import threading
import time
from typing import Protocol

from vllm_duck.errors import DuckError
from vllm_duck.executor.duck import MoeReply, Partial, ReplyDtype
from vllm_duck.executor.wire.codec import NUMPY_DTYPE

# The limit of a duck that is lost meanwhile may come before the request's.
_LONGEST_NAP_S = 1.0


class Asked(Protocol):
    """The duck that owes the reply."""

    def limit_s(self, pending: "Pending") -> float:
        """When on_limit() is due, `time.monotonic`; it moves."""
        ...

    def on_limit(self, pending: "Pending") -> None: ...


class Pending:
    """One request in flight."""

    def __init__(
        self,
        duck: Asked,
        message: bytes,
        shape: tuple[int, ...],
        reply_dtype: ReplyDtype,
    ) -> None:
        self._duck = duck
        self.message = message
        self._shape = shape
        self._num_bytes = math.prod(shape) * NUMPY_DTYPE[reply_dtype].itemsize
        self._outcome: MoeReply | DuckError | None = None
        self._done = threading.Event()
        self.sent_now()
        # Streams that it was sent on, and that broke.
        self.num_losses = 0

    def sent_now(self) -> None:
        """It was sent, perhaps again: from now on it is timed."""
        self.sent_ns = time.perf_counter_ns()
        self.sent_s = time.monotonic()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> MoeReply:
        # The limit moves while the duck is lost.
        while not self._done.wait(self._nap_s()):
            self._duck.on_limit(self)
        if isinstance(self._outcome, MoeReply):
            return self._outcome
        assert self._outcome is not None
        raise renewed(self._outcome)

    def _nap_s(self) -> float:
        left_s = self._duck.limit_s(self) - time.monotonic()
        return min(max(0.0, left_s), _LONGEST_NAP_S)

    def misfit(self, partial: Partial) -> str:
        """What is wrong with the shape or dtype of a partial sum, if anything is."""
        if (partial.shape, partial.nbytes) == (self._shape, self._num_bytes):
            return ""
        return (
            f"expected a partial sum of shape {list(self._shape)} in "
            f"{self._num_bytes} bytes, got {list(partial.shape)} in {partial.nbytes}"
        )

    def finish(self, outcome: MoeReply | DuckError) -> None:
        """Set the outcome; called once."""
        self._outcome = outcome
        self._done.set()


def renewed(error: DuckError) -> DuckError:
    """A copy to raise: one error object raised in two threads mixes their traces."""
    copy = type(error)(str(error))
    copy.__cause__ = error.__cause__
    return copy
