"""What overlapping saved: the times of a step's stages, and their sums.

The words of the log line: *pair* is what the lanes took together, *serial* the sum of
their parts, *gain* the difference and *ratio* gain / serial. s0 is the host's work,
s1 the ducks', *wait* what the host waited for each lane.
"""

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from vllm_duck.executor.duck import CallTimes


class Stages(NamedTuple):
    """One layer of one lane; times are `time.perf_counter_ns`."""

    begin_ns: int
    end_ns: int
    wait_begin_ns: int
    wait_end_ns: int
    # None: a dense layer, which asks no duck.
    call: CallTimes | None


class LaneTimes:
    """The layers of one lane, in order."""

    def __init__(self) -> None:
        self.stages: list[Stages] = []
        self._begin_ns = self._end_ns = self._wait_begin_ns = 0

    def begin_host(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def end_host(self) -> None:
        self._end_ns = time.perf_counter_ns()

    def begin_wait(self) -> None:
        self._wait_begin_ns = time.perf_counter_ns()

    def end_wait(self, call: CallTimes | None) -> None:
        wait_end_ns = time.perf_counter_ns()
        self.stages.append(
            Stages(self._begin_ns, self._end_ns, self._wait_begin_ns, wait_end_ns, call)
        )


@dataclass(frozen=True)
class StepRecord:
    """The layers of one step, from the first with ducks on; one lane if serial."""

    lanes: tuple[LaneTimes, ...]
    # Why it ran serially; None if it did not.
    serial_reason: str | None

    @property
    def seconds(self) -> float:
        """From the first stage 0 to the last result."""
        begin_ns = min(lane.stages[0].begin_ns for lane in self.lanes)
        end_ns = max(lane.stages[-1].wait_end_ns for lane in self.lanes)
        return (end_ns - begin_ns) / 1e9


@dataclass(frozen=True)
class Overlap:
    """Sums over steps that ran in lanes, seconds."""

    num_steps: int = 0
    pair_s: float = 0.0
    s0_s: float = 0.0
    s1_s: float = 0.0
    # What the pair would take if the lanes only waited for the longer stage.
    ideal_s: float = 0.0
    # What the host waited for each lane.
    wait_s: tuple[float, ...] = ()

    @property
    def serial_s(self) -> float:
        return self.s0_s + self.s1_s

    @property
    def ratio(self) -> float:
        """The share of the serial time that overlapping saved."""
        return 1 - self.pair_s / self.serial_s if self.serial_s else 0.0

    @property
    def efficiency(self) -> float:
        """The share of what could be saved that was."""
        saveable_s = self.serial_s - self.ideal_s
        return (self.serial_s - self.pair_s) / saveable_s if saveable_s else 0.0

    def __add__(self, other: "Overlap") -> "Overlap":
        return self._plus(other, 1)

    def __sub__(self, other: "Overlap") -> "Overlap":
        return self._plus(other, -1)

    def __str__(self) -> str:
        if not self.num_steps:
            return "olap no step ran in lanes"

        def ms(seconds: float) -> float:
            return 1000 * seconds / self.num_steps

        waits = "/".join(f"{ms(seconds):.2f}" for seconds in self.wait_s)
        return (
            f"olap pair={ms(self.pair_s):.2f}ms serial={ms(self.serial_s):.2f}ms "
            f"gain={ms(self.serial_s - self.pair_s):.2f}ms ratio={self.ratio:.3f} "
            f"s0={ms(self.s0_s):.2f} s1={ms(self.s1_s):.2f} wait={waits} "
            f"efficiency={self.efficiency:.2f} steps={self.num_steps}"
        )

    def figures(self) -> dict[str, Any]:
        """As plain values; `from_figures` is the inverse."""
        return {**asdict(self), "wait_s": list(self.wait_s)}

    @classmethod
    def from_figures(cls, figures: dict[str, Any]) -> "Overlap":
        return cls(**{**figures, "wait_s": tuple(figures["wait_s"])})

    def _plus(self, other: "Overlap", sign: int) -> "Overlap":
        # A sum of nothing has no lanes yet.
        waits = zip_longest(self.wait_s, other.wait_s, fillvalue=0.0)
        return Overlap(
            num_steps=self.num_steps + sign * other.num_steps,
            pair_s=self.pair_s + sign * other.pair_s,
            s0_s=self.s0_s + sign * other.s0_s,
            s1_s=self.s1_s + sign * other.s1_s,
            ideal_s=self.ideal_s + sign * other.ideal_s,
            wait_s=tuple(ours + sign * theirs for ours, theirs in waits),
        )


def overlap_of(record: StepRecord) -> Overlap:
    """The sums of one step in lanes.

    A reply that comes while the host works is seen late, and one that queued behind the
    other lane took longer than it would have alone; so a stage 1 counts as the slowest
    duck's compute plus the least network time of the step. A dense layer is work of the
    host alone.
    """
    s0_ns, compute_us, num_calls = 0, 0, 0
    link_us: float = math.inf
    wait_s = []
    # One pass, since it is part of every step.
    for lane in record.lanes:
        wait_ns = 0
        for begin_ns, end_ns, wait_begin_ns, wait_end_ns, call in lane.stages:
            s0_ns += end_ns - begin_ns
            wait_ns += wait_end_ns - wait_begin_ns
            if call is not None:
                num_calls += 1
                compute_us += call.compute_us
                link_us = min(link_us, call.link_us)
        wait_s.append(wait_ns / 1e9)
    s0_s, s1_s = s0_ns / 1e9, (compute_us + num_calls * link_us) / 1e6
    longer_s, shorter_s = max(s0_s, s1_s), min(s0_s, s1_s)
    return Overlap(
        num_steps=1,
        pair_s=record.seconds,
        s0_s=s0_s,
        s1_s=s1_s,
        # L * 2 * max(c, d) + min(c, d) of L layers with ducks, in two lanes.
        ideal_s=longer_s + shorter_s / num_calls,
        wait_s=tuple(wait_s),
    )


@dataclass
class OverlapMeter:
    """Adds up the steps of a model; the only owner of its sums."""

    total: Overlap = field(default_factory=Overlap)
    # Steps that ran serially, by reason.
    serial_steps: Counter[str] = field(default_factory=Counter)
    # How many of the next steps to keep in `records`.
    num_wanted: int = 0
    records: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        if record.serial_reason is None:
            self.total += overlap_of(record)
        else:
            self.serial_steps[record.serial_reason] += 1
        if self.num_wanted:
            self.num_wanted -= 1
            self.records.append(record)

    def figures(self) -> dict[str, Any]:
        """All sums, as plain values."""
        return {
            "overlap": self.total.figures(),
            "serial_steps": dict(self.serial_steps),
        }
