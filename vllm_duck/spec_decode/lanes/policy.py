"""Whether a step runs in lanes: only where that was measured to be quicker."""

from dataclasses import dataclass, field

from vllm_duck.spec_decode.lanes.ab_trial import ABTrial
from vllm_duck.spec_decode.lanes.times import StepRecord

# Why a step that could be divided is not.
SLOWER = "lanes measured slower"


@dataclass
class LanePolicy:
    """Whether steps may run in lanes, and whether only where that is quicker."""

    overlaps: bool
    # In lanes or whole, by rows; None: always in lanes where a step can be divided.
    times: ABTrial | None = field(default_factory=ABTrial)

    def prefers_lanes(self, num_rows: int) -> bool:
        if self.times is None:
            return True
        trial = self.times.next_trial(num_rows)
        return self.times.is_first_better(num_rows) if trial is None else trial

    def observe(self, num_rows: int, record: StepRecord) -> None:
        """Learn from a step that could have run either way."""
        in_lanes = record.serial_reason is None
        if self.times is not None and (in_lanes or record.serial_reason == SLOWER):
            self.times.observe(num_rows, is_first=in_lanes, seconds=record.seconds)
