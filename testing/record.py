"""Writes down what engines answer and send, to compare two trees bit by bit.

    python -m testing.record before.json        in one tree
    python -m testing.record after.json         in the other
    diff before.json after.json                 says what a change has changed

Greedy and seeded answers, logprobs and penalties; with and without drafts; in lanes and
serially, on the bundled checkpoint. A line has a digest of the answers (tokens, texts,
logprobs) or counts of drafts and calls; requests to the ducks are digested whatever
their order, so that lanes and the serial schedule compare too.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from testing.answers import (
    ask,
    draft_counts,
    lanes_are,
    make_prompts,
    runner_of,
    start,
    worker_of,
)
from testing.engines import closing_engines
from vllm_duck.executor.duck import InFlight, MoeRequest, MoeSum

MODEL_DIR = Path(__file__).parent.parent / "models" / "tiny-v32"
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 5},
    {
        "temperature": 0.8,
        "seed": 7,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_tokens": 60,
    },
)


class RecordedDucks:
    """`Ducks` that hands every request on, and keeps the sum of their digests."""

    def __init__(self, ducks: Any) -> None:
        self._ducks = ducks
        self.num_calls = 0
        self.content = 0

    def send(self, request: MoeRequest) -> InFlight[MoeSum]:
        digest = hashlib.sha256()
        layer_idx = np.int64(request.layer_idx)
        rows = (request.hidden, request.topk_ids, request.topk_weights)
        for part in (layer_idx, *rows):
            digest.update(np.ascontiguousarray(part).tobytes())
        self.num_calls += 1
        self.content += int.from_bytes(digest.digest()[:16], "big")
        self.content %= 1 << 128
        return self._ducks.send(request)


def record(model_dir: Path = MODEL_DIR) -> dict[str, Any]:
    """One line per engine, schedule and sampling."""
    found: dict[str, Any] = {}
    with closing_engines():
        for speculates in (False, True):
            llm = start(
                model_dir,
                speculates=speculates,
                max_num_batched_tokens=256,
                block_size=16,
            )
            for name, value in _record_engine(llm, make_prompts(model_dir)):
                found[f"{'drafts' if speculates else 'plain'}, {name}"] = value
            if speculates:
                found["drafts verified, accepted"] = draft_counts(llm)
    return found


def _record_engine(llm: Any, prompts: list[list[int]]) -> Iterator[tuple[str, Any]]:
    ducks = RecordedDucks(worker_of(llm).fleet)
    runner_of(llm).attach_ducks(ducks)
    for overlaps in (False, True):
        for sampling in SAMPLINGS:
            llm.reset_prefix_cache()
            with lanes_are(overlaps, llm):
                said = ask(llm, prompts, **sampling)
            name = f"{'lanes' if overlaps else 'serial'}, {sampling or 'greedy'}"
            yield name, hashlib.sha256(repr(said).encode()).hexdigest()
            yield f"{name}, calls", [ducks.num_calls, f"{ducks.content:032x}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where to write the record")
    file = parser.parse_args().file
    file.write_text(json.dumps(record(), indent=1) + "\n")
