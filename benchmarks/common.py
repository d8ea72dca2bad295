"""The form that every benchmark has: its options, its results, how they are shown.

A benchmark module defines `run(quick) -> Iterator[Result]` and ends with
`if __name__ == "__main__": main("name", run, __doc__)`.
"""

import argparse
import ctypes
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_PR_SET_PDEATHSIG = 1

MODEL_DIR = Path(__file__).parent.parent / "models" / "tiny-v32"


@dataclass(frozen=True)
class Result:
    """One measured value, and the peer's in the same run.

    A row without a peer states a figure; `target` is what it should reach, as text.
    """

    case: str
    metric: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    target: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.peer_value if self.peer_value else None

    def to_json(self, bench: str) -> dict[str, Any]:
        return {
            "bench": bench,
            "case": self.case,
            "metric": self.metric,
            "value": self.value,
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": self.peer_value,
            "ratio": self.ratio,
        }

    def __str__(self) -> str:
        text = f"{self.case:<44} {self.metric:<22} {_number(self.value)} {self.unit}"
        if self.ratio is not None:
            text += f"   {self.peer} {_number(self.peer_value)}"
            text += f"   ratio {self.ratio:.2f}"
        return text + (f"   (target {self.target})" if self.target else "")


def main(
    bench: str, run: Callable[[bool], Iterable[Result]], doc: str | None = None
) -> None:
    """Parse --quick and --json, run, and print each result as it comes."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer repetitions, or fewer cases: a minute or two",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write one object a line"
    )
    options = parser.parse_args()
    with _json_lines(options.json) as write:
        for result in run(options.quick):
            print(result, flush=True)
            write(result.to_json(bench))


def end_with_parent() -> None:
    """Have the system end this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def running(command: Sequence[str]) -> Iterator[None]:
    """A process that says "ready" once it serves, as `serve` does."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"did not start: {shlex.join(command)}")
        yield
    finally:
        process.terminate()
        process.wait()


def serve(start: Callable[[], object]) -> None:
    """Start what serves in the background, say so, and stay."""
    start()
    print("ready", flush=True)
    while True:
        time.sleep(3600)


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """The 50th and the 99th percentile."""
    p50, p99 = np.percentile(list(values), [50, 99])
    return float(p50), float(p99)


@contextmanager
def _json_lines(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    if path is None:
        yield lambda entry: None
        return
    with path.open("w", buffering=1) as file:
        yield lambda entry: print(json.dumps(entry), file=file)


def _number(value: float | None) -> str:
    assert value is not None
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
