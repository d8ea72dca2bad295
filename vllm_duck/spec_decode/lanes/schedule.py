"""The order in which the lanes of a step go through the layers.

A layer has two stages: stage 0 is the host's work and ends by sending the rows to the
ducks; stage 1 is theirs. Invariants, pinned by tests:
- stage 0 of a lane at layer i + 1 comes after its stage 1 at layer i;
- stage 0 of lane k at layer i comes after that of lane k - 1 at layer i, so that a lane
  sees the keys that the lanes before it wrote.
"""

from collections.abc import Sequence
from typing import Protocol


class Lane(Protocol):
    """Some tokens of a step on their way through the layers."""

    def stage0(self, layer: int) -> None:
        """Begin stage 0 of the layer; what follows it is then in flight."""
        ...

    def is_sent(self) -> bool:
        """Whether stage 0 has ended and the rows are with the ducks.

        A host that computes elsewhere sends the rows in this call, once they are ready.
        """
        ...

    def is_done(self) -> bool:
        """Whether the stage 1 in flight has ended."""
        ...

    def stage1(self) -> None:
        """Wait for the stage 1 in flight, and take what it gives."""
        ...


def run_lanes(lanes: Sequence[Lane], num_layers: int) -> None:
    """Take every lane through all layers; what can run next runs next.

    A stage 1 that has ended is taken first; then the first lane that may begins its
    stage 0; and if none may, one stage 1 is waited for.
    """
    num_started = [0] * len(lanes)
    # In the order of sending.
    in_flight: list[int] = []

    def may_start(k: int) -> bool:
        ahead = num_layers if k == 0 else num_started[k - 1]
        return num_started[k] < ahead and k not in in_flight

    while True:
        for done in [k for k in in_flight if lanes[k].is_done()]:
            lanes[done].stage1()
            in_flight.remove(done)
        k = next((k for k in range(len(lanes)) if may_start(k)), None)
        if k is not None:
            lanes[k].stage0(num_started[k])
            num_started[k] += 1
            in_flight.append(k)
        elif in_flight:
            k = next_to_take(lanes, in_flight)
            lanes[k].stage1()
            in_flight.remove(k)
        else:
            return


def next_to_take(lanes: Sequence[Lane], in_flight: Sequence[int]) -> int:
    """The lane whose stage 1 is taken next, once all rows are sent or one has ended.

    While rows are still to be sent, is_sent() is what sends them: no lane is waited for
    then, and the first whose stage 1 ends is taken. Behind that it is the lane that was
    sent first, since ducks answer in order; waiting for it is left to stage1().
    """
    while not all([lanes[k].is_sent() for k in in_flight]):
        for k in in_flight:
            if lanes[k].is_done():
                return k
    return in_flight[0]
