"""A GPU for tests: it runs late, as a seed has it, and checks who waited for whom.

Actors are the host and each stream. Each has a clock: how far it knows the others to
have come, by the order of a stream, a launch, or a flag that was seen. An access that
its actor's clock does not put behind the last write, and a write that it does not put
behind all reads, is an `OrderError`, whether or not it went well this time.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

HOST = "host"
MAIN = "main"

# How far actors have come, as one of them knows.
Clock = dict[str, int]


class OrderError(AssertionError):
    """A rule of models/cuda/device.py is broken."""


class Access(NamedTuple):
    actor: str
    tick: int


@dataclass(eq=False)
class Buffer:
    """Memory, and who used it last; until written, NaN or the greatest integer."""

    name: str
    data: np.ndarray
    is_freed: bool = False
    written: Access | None = None
    reads: list[Access] = field(default_factory=list)
    # Of a flag: what its writer knew at each value.
    released: dict[int, Clock] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """`function` gets the arrays of reads, read-only, and then those of writes."""

    name: str
    reads: Sequence[Buffer]
    writes: Sequence[Buffer]
    function: Callable[..., None]
    # Raised, by one, once all the rest is done.
    flag: Buffer | None = None

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.reads, *self.writes, *([self.flag] if self.flag else [])]


class FakeGpu:
    """A `models.cuda.device.Device` over `Buffer`s."""

    def __init__(self, seed: int = 0) -> None:
        self.num_captures = 0
        self._random = random.Random(seed)
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._queues: dict[str, deque[tuple[Kernel, Clock]]] = {}
        self._captured: list[Kernel] | None = None

    def allocate(self, name: str, shape: Any, dtype: Any = np.float32) -> Buffer:
        self._refuse_in_capture(f"{name} is allocated")
        poison = np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
        return Buffer(name, np.full(shape, poison, dtype))

    def allocate_flag(self, name: str) -> Buffer:
        self._refuse_in_capture(f"{name} is allocated")
        return Buffer(name, np.zeros(1, np.int64))

    def free(self, buffer: Buffer) -> None:
        buffer.is_freed = True

    def start(self, kernel: Kernel) -> None:
        """What a stage calls for each of its kernels."""
        if self._captured is None:
            raise OrderError(f"{kernel.name} starts outside of a capture")
        self._captured.append(kernel)

    def capture(self, work: Callable[[], None]) -> tuple[Kernel, ...]:
        self._refuse_in_capture("a second capture begins")
        self._captured, self.num_captures = [], self.num_captures + 1
        try:
            work()
            return tuple(self._captured)
        finally:
            self._captured = None

    def launch(self, graph: tuple[Kernel, ...], stream: str = MAIN) -> None:
        self._refuse_in_capture("a graph is launched")
        for kernel in graph:
            for buffer in kernel.buffers:
                if buffer.is_freed:
                    raise OrderError(f"{kernel.name} has {buffer.name}, which is freed")
        # A stream knows what the host knew at the launch.
        known = dict(self._clocks[HOST])
        queue = self._queues.setdefault(stream, deque())
        queue.extend((kernel, known) for kernel in graph)

    def is_raised(self, flag: Buffer, value: int) -> bool:
        """Meanwhile the GPU does a little, or nothing."""
        self._refuse_in_capture(f"the host looks at {flag.name}")
        for _ in range(self._random.choice((0, 0, 1, 2, 5))):
            self.run_one()
        if flag.data[0] > value:
            raise OrderError(f"{flag.name} is {flag.data[0]}, and {value} was awaited")
        if flag.data[0] < value:
            return False
        self._learn(HOST, flag.released.get(value, {}))
        return True

    def host_read(self, buffer: Buffer) -> np.ndarray:
        self._refuse_in_capture(f"the host reads {buffer.name}")
        self._access(HOST, reads=[buffer], writes=[])
        return _read_only(buffer.data)

    def host_write(self, buffer: Buffer, rows: np.ndarray) -> None:
        self._refuse_in_capture(f"the host writes {buffer.name}")
        self._access(HOST, reads=[], writes=[buffer])
        buffer.data[: len(rows)] = rows

    def run_one(self) -> bool:
        """Run a kernel of one of the streams; False: there is none."""
        waiting = [stream for stream, queue in self._queues.items() if queue]
        if not waiting:
            return False
        stream = self._random.choice(waiting)
        kernel, known = self._queues[stream].popleft()
        self._learn(stream, known)
        self._access(stream, kernel.reads, kernel.writes)
        reads = [_read_only(buffer.data) for buffer in kernel.reads]
        kernel.function(*reads, *(buffer.data for buffer in kernel.writes))
        if kernel.flag is not None:
            self._raise(kernel.flag, stream)
        return True

    def run_all(self) -> None:
        """Run what is left; the host has waited for nothing by that."""
        while self.run_one():
            pass

    def _raise(self, flag: Buffer, stream: str) -> None:
        """One stream counts a flag up; another would lose counts."""
        if flag.written is not None and not self._knows(stream, flag.written):
            raise OrderError(f"{stream} raises {flag.name} beside {flag.written.actor}")
        flag.written = Access(stream, self._tick(stream))
        flag.data[0] += 1
        flag.released[int(flag.data[0])] = dict(self._clocks[stream])

    def _access(
        self, actor: str, reads: Sequence[Buffer], writes: Sequence[Buffer]
    ) -> None:
        now = Access(actor, self._tick(actor))
        for buffer in reads:
            if buffer.written is None:
                raise OrderError(f"{actor} reads {buffer.name}, which nobody wrote")
            self._require(now, f"reads {buffer.name}", [buffer.written])
            buffer.reads.append(now)
        for buffer in writes:
            before = [buffer.written] if buffer.written else []
            self._require(now, f"writes {buffer.name}", [*before, *buffer.reads])
            buffer.written, buffer.reads = now, []

    def _require(self, now: Access, does: str, before: Sequence[Access]) -> None:
        for access in before:
            if not self._knows(now.actor, access):
                raise OrderError(
                    f"{now.actor} {does}, but did not wait for {access.actor}"
                )

    def _knows(self, actor: str, access: Access) -> bool:
        return self._clocks[actor].get(access.actor, 0) >= access.tick

    def _tick(self, actor: str) -> int:
        clock = self._clocks.setdefault(actor, {})
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    def _learn(self, actor: str, known: Clock) -> None:
        clock = self._clocks.setdefault(actor, {})
        for other, tick in known.items():
            clock[other] = max(clock.get(other, 0), tick)

    def _refuse_in_capture(self, what: str) -> None:
        if self._captured is not None:
            raise OrderError(f"{what} in a capture")


def _read_only(data: np.ndarray) -> np.ndarray:
    view = data.view()
    view.flags.writeable = False
    return view
