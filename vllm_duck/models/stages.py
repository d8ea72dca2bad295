"""What lies between the two stages of a layer, and what comes of them."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_duck.executor.duck import CallTimes
from vllm_duck.models.host import Bits


class LayerOutput(NamedTuple):
    """A layer's output [T, H] bf16 bits, and how long its ducks took."""

    hidden: Bits
    # None: a layer without ducks.
    call: CallTimes | None


class PendingLayer(Protocol):
    """A layer from the begin of its stage 0 to the end of its stage 1."""

    def is_sent(self) -> bool:
        """Whether the rows are with the ducks; sends them if they only now can be."""
        ...

    def is_done(self) -> bool:
        """Whether wait() would return or raise at once."""
        ...

    def wait(self) -> LayerOutput:
        """Wait for stage 1."""
        ...


@dataclass(frozen=True)
class DoneLayer:
    """A dense layer has no second stage."""

    hidden: Bits

    def is_sent(self) -> bool:
        return True

    def is_done(self) -> bool:
        return True

    def wait(self) -> LayerOutput:
        return LayerOutput(self.hidden, None)
