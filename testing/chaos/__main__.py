"""Faults at random while an engine decodes: its tokens stay the undisturbed ones.

`python -m testing.chaos` starts the bundled model's engine, with drafts and in lanes,
and ducks: near ones behind proxies, and as root one on a host of its own (a network
namespace behind a link of 2.5 Gb/s). Round after round it asks some prompts, greedy or
seeded, and meanwhile ducks are killed, stopped and replaced by others, connections cut,
held and damaged, cables pulled, packets lost, and strangers knock. Then come scenes
that need no engine: a host that is killed, a disk that is full.

The last line is the verdict; the seed replays the same faults, though not to the
microsecond.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from testing.answers import start
from testing.chaos.rounds import Chaos
from testing.chaos.scenes import SCENES, Scene
from testing.engines import closing_engines

MODEL_DIR = Path(__file__).parents[2] / "models" / "tiny-v32"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m testing.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=1200.0, help="of rounds (default: 1200)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(1 << 31),
        help="of the faults; without it a new one, which is printed",
    )
    parser.add_argument(
        "--pull", type=float, default=30.0, help="longest time without a cable"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, closing_engines():
        os.chdir(folder)
        llm = start(MODEL_DIR, speculates=True)
        chaos = Chaos(llm, MODEL_DIR, options.seed, options.pull)
        end_s = time.monotonic() + options.seconds
        for line in chaos.run(lambda _: time.monotonic() < end_s):
            print(line, flush=True)
    failed = [name for name, scene in SCENES.items() if not _holds(name, scene)]
    counts = chaos.counts
    is_ok = not counts["wrong"] and not failed
    print(
        f"chaos {'ok' if is_ok else 'failed'}: {counts['rounds']} rounds, "
        f"{counts['faults']} faults, {counts['requests']} requests, "
        f"{counts['wrong']} wrong, {counts['refused']} ended by an error that names "
        f"a duck; {len(SCENES)} scenes, {len(failed)} failed; seed {options.seed}"
    )
    return int(not is_ok)


def _holds(name: str, scene: Scene) -> bool:
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            said = scene(MODEL_DIR, Path(folder))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    print(f"{name}: {said or 'ok'}, {time.monotonic() - begun_s:.1f} s", flush=True)
    return said is None


if __name__ == "__main__":
    sys.exit(main())
