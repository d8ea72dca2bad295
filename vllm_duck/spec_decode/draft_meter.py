"""What became of drafts, by depth, and what drawing them took."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import sub
from typing import Any


@dataclass(frozen=True)
class DraftSums:
    """Sums over the steps of decoding; one entry per depth where there are several.

    scheduled  drafts that got rows
    accepted   those that were taken, and so all in front of them
    mtp_s      of the MTP layer's runs: over confirmed rows, and over deeper drafts
    step_s     of the steps up to their tokens
    """

    scheduled: tuple[int, ...]
    accepted: tuple[int, ...]
    mtp_s: tuple[float, ...]
    step_s: float = 0.0

    @classmethod
    def nothing(cls, num_drafts: int) -> "DraftSums":
        return cls((0,) * num_drafts, (0,) * num_drafts, (0.0,) * num_drafts)

    @property
    def chances(self) -> list[float]:
        """How often the first 1, 2, ... drafts were all accepted where they had rows.

        Up to the deepest draft that had one.
        """
        pairs = zip(self.accepted, self.scheduled, strict=True)
        return [accepted / scheduled for accepted, scheduled in pairs if scheduled]

    @property
    def mtp_share(self) -> float:
        """Of the time of steps, what the MTP layer's runs took."""
        mtp_s = sum(self.mtp_s)
        return mtp_s / (self.step_s + mtp_s) if mtp_s else 0.0

    def __sub__(self, other: "DraftSums") -> "DraftSums":
        return DraftSums(
            tuple(map(sub, self.scheduled, other.scheduled)),
            tuple(map(sub, self.accepted, other.accepted)),
            tuple(map(sub, self.mtp_s, other.mtp_s)),
            self.step_s - other.step_s,
        )

    def __str__(self) -> str:
        chances = "/".join(f"{chance:.2f}" for chance in self.chances)
        rows = "/".join(str(count) for count in self.scheduled if count)
        return f"drafts accepted={chances} of={rows} mtp={self.mtp_share:.3f}"

    def figures(self) -> dict[str, Any]:
        """As plain values; `from_figures` is the inverse."""
        return asdict(self)

    @classmethod
    def from_figures(cls, figures: dict[str, Any]) -> "DraftSums":
        return cls(
            tuple(figures["scheduled"]),
            tuple(figures["accepted"]),
            tuple(figures["mtp_s"]),
            figures["step_s"],
        )


class DraftMeter:
    """Adds up the steps of a model."""

    def __init__(self, num_drafts: int) -> None:
        self._scheduled = [0] * num_drafts
        self._accepted = [0] * num_drafts
        self._mtp_s = [0.0] * num_drafts
        self._step_s = 0.0

    def add_verified(self, num_drafts: int, num_accepted: int) -> None:
        """The drafts of one request that had rows, and how many of them were taken."""
        for depth in range(num_drafts):
            self._scheduled[depth] += 1
            self._accepted[depth] += depth < num_accepted

    def add_step(self, seconds: float, passes: Sequence[tuple[int, float]]) -> None:
        """A step's time up to its tokens; the MTP layer's runs: requests, seconds."""
        self._step_s += seconds
        for depth, (_, pass_s) in enumerate(passes):
            self._mtp_s[depth] += pass_s

    @property
    def total(self) -> DraftSums:
        return DraftSums(
            tuple(self._scheduled),
            tuple(self._accepted),
            tuple(self._mtp_s),
            self._step_s,
        )
