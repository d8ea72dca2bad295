"""A line of the doctor's report."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` is empty when all is well.

    is_broken: nothing can be served before the advice is followed; without it, what
    there is works, only slower.
    """

    what: str
    state: str
    advice: str = ""
    is_broken: bool = False

    def __str__(self) -> str:
        mark = "BROKEN" if self.is_broken else "slower" if self.advice else "ok"
        advice = f"\n         -> {self.advice}" if self.advice else ""
        return f"  {mark:<6} {self.what:<16} {self.state}{advice}"


def broken(what: str, state: str, advice: str) -> Finding:
    return Finding(what, state, advice, is_broken=True)
