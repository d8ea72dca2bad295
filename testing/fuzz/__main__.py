"""Damaged input for every reader: wire, protos, HTTP/2, files and settings.

`python -m testing.fuzz` gives each of them its share of a million cases (--cases),
damaged from sound ones. A reader may take a case or refuse it by one of vllm_duck's own
errors; anything else it raises is a finding, which is kept in testing/fuzz/corpus and
tried by the tests from then on. C++ that goes wrong ends the process: run it under
sanitizers, with `scripts/sanitize.sh kernel --fuzz N` and `stream --fuzz N`. The last
line is the verdict.
"""

import argparse
import faulthandler
import hashlib
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from testing.fuzz.targets import Target, all_targets
from vllm_duck.errors import DuckError

CORPUS = Path(__file__).parent / "corpus"
MILLION = 1_000_000
# A machine may be busy; a loop without a bound takes for ever.
LONGEST_CASE_S = 20.0


def fuzz(target: Target, num_cases: int, seed: int) -> list[bytes]:
    """The cases that are findings, at most ten."""
    rng = random.Random(f"{target.name} {seed}")
    found: list[bytes] = []
    for _ in range(num_cases):
        case = target.case(rng)
        problem = try_case(target, case)
        if problem:
            print(f"{target.name}: {problem}", flush=True)
            found.append(case)
            if len(found) == 10:
                break
    return found


def try_case(target: Target, case: bytes) -> str:
    """What is wrong with how the target takes it; empty: nothing."""
    signal.setitimer(signal.ITIMER_REAL, LONGEST_CASE_S)
    try:
        target.take(case)
    except DuckError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


def _time_is_over(number: int, frame: object) -> NoReturn:
    raise TimeoutError(f"it took more than {LONGEST_CASE_S} s")


def kept() -> dict[str, list[bytes]]:
    """Former findings, by target."""
    folders = sorted(path for path in CORPUS.iterdir() if path.is_dir())
    return {
        folder.name: [file.read_bytes() for file in sorted(folder.iterdir())]
        for folder in folders
    }


def _keep(name: str, case: bytes) -> None:
    folder = CORPUS / name
    folder.mkdir(exist_ok=True)
    (folder / hashlib.sha256(case).hexdigest()[:16]).write_bytes(case)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m testing.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        type=int,
        default=MILLION,
        metavar="N",
        help="of all targets together (default: a million)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(1 << 31),
        help="of the damage; without it a new one, which is printed",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="targets, which share the cases"
    )
    options = parser.parse_args(arguments)
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _time_is_over)
    print(f"seed {options.seed}", flush=True)
    num_tried = num_found = 0
    with all_targets() as targets:
        chosen = [t for t in targets if not options.only or t.name in options.only]
        whole = sum(target.share for target in chosen)
        for target in chosen:
            begun_s = time.monotonic()
            num_cases = max(1, options.cases * target.share // whole)
            found = fuzz(target, num_cases, options.seed)
            for case in found:
                _keep(target.name, case)
            num_tried, num_found = num_tried + num_cases, num_found + len(found)
            seconds = time.monotonic() - begun_s
            print(f"{target.name}: {num_cases:,} cases, {seconds:.0f} s", flush=True)
    verdict = "failed" if num_found else "ok"
    print(f"fuzz {verdict}: {num_tried:,} cases, {num_found} findings")
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
