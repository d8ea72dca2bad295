"""What two lanes bring, in one run each way.

`paced` ducks sleep, so that the ratio of the host's time c to the ducks' time d can be
swept on two cores; `real` ducks compute in processes of their own; `link` puts a paced
duck behind 2.5 Gb/s and 100 us in a network namespace (needs root; left out elsewhere).
Saved share and efficiency are the log line's: of the serial time, and of what a perfect
overlap would save. Tokens a second compare whole engines; the formula is
(1 + acceptance) (c + d) / (2 max(c, d)). The models have random weights and a chosen
acceptance (random_model.py), but for the bundled one. What is compared takes turns, in
engines that live side by side. --quick is `paced` and `real` at c = d; all of it starts
22 engines and takes about half an hour on two cores.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import MODEL_DIR, Result, main
from benchmarks.overlap.depth import depth, tail
from benchmarks.overlap.random_model import DEEP, WIDE, write_random_model
from benchmarks.overlap.stages import RATIOS, behind_a_link, paced, real
from benchmarks.overlap.tokens import beside_stock, gated, whole_engines


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    num_tokens = 48 if quick else 192
    with tempfile.TemporaryDirectory() as directory:
        wide = write_random_model(WIDE, Path(directory) / "wide")
        yield from paced(wide, num_tokens, (1.0,) if quick else RATIOS)
        yield from real(wide, num_tokens)
        if quick:
            return
        yield from behind_a_link(wide, num_tokens)
        yield from whole_engines("wide", wide, num_tokens)
        yield from tail("wide", wide, num_tokens)
        yield from whole_engines("bundled", model_dir, 4 * num_tokens)
        yield from beside_stock(model_dir, Path(directory) / "v3", 4 * num_tokens)
        yield from gated(Path(directory), num_tokens)
        deep = write_random_model(DEEP, Path(directory) / "deep")
        yield from depth(deep, num_tokens)
        yield from whole_engines("58 MoE layers,", deep, num_tokens)
        yield from tail("58 MoE layers,", deep, num_tokens)


if __name__ == "__main__":
    main("overlap", run, __doc__)
