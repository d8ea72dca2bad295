"""What overlapping brought: the times of a step's stages, and their sums.

The words of the log line: *pair* is what the two lanes took together, *serial* the sum
of their parts, *gain* the difference and *ratio* gain / serial. s0 is the host's work,
s1 the ducks', *wait* what the host waited for each lane.
"""

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from operator import add, sub
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
    """Sums over steps that ran in two lanes, seconds."""

    num_steps: int = 0
    pair_s: float = 0.0
    s0_s: float = 0.0
    s1_s: float = 0.0
    wait0_s: float = 0.0
    wait1_s: float = 0.0
    # What the pair would take if nothing but the longer stage counted.
    ideal_s: float = 0.0

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
        return Overlap(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: "Overlap") -> "Overlap":
        return Overlap(*map(sub, vars(self).values(), vars(other).values()))

    def __str__(self) -> str:
        if not self.num_steps:
            return "olap no step ran in two lanes"

        def ms(seconds: float) -> float:
            return 1000 * seconds / self.num_steps

        return (
            f"olap pair={ms(self.pair_s):.2f}ms serial={ms(self.serial_s):.2f}ms "
            f"gain={ms(self.serial_s - self.pair_s):.2f}ms ratio={self.ratio:.3f} "
            f"s0={ms(self.s0_s):.2f} s1={ms(self.s1_s):.2f} "
            f"wait={ms(self.wait0_s):.2f}/{ms(self.wait1_s):.2f} "
            f"efficiency={self.efficiency:.2f} steps={self.num_steps}"
        )


def overlap_of(record: StepRecord) -> Overlap:
    """The sums of one step in two lanes.

    A reply that comes while the host works is seen late, and one that queued behind the
    other lane took longer than it would have alone; so a stage 1 counts as the slowest
    duck's compute plus the quickest way there and back of the step. A dense layer is
    work of the host alone.
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
        wait0_s=wait_s[0],
        wait1_s=wait_s[1],
        # L * 2 * max(c, d) + min(c, d) of L layers with ducks.
        ideal_s=longer_s + shorter_s / num_calls,
    )


@dataclass
class OverlapMeter:
    """Adds up the steps of a model; the only owner of its sums."""

    total: Overlap = field(default_factory=Overlap)
    # Steps that ran serially, by reason.
    serial_steps: Counter[str] = field(default_factory=Counter)
    # The latest steps, when they are asked for: how many are still to come, and those.
    records: list[StepRecord] = field(default_factory=list)
    num_wanted: int = 0

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
            "overlap": asdict(self.total),
            "serial_steps": dict(self.serial_steps),
        }
