"""A host as a process of its own: `python -m testing.chaos.one_host WHAT MODEL DUCKS`.

calls: sends requests to the ducks (separated by commas) until it is killed.
tokens: an engine that uses them, and prints its tokens as its last line.
tokens_without_room: the same, and before it is asked, /tmp and /dev/shm are filled. Run
    it where they are its own.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from testing.ducks.bf16 import f32_to_bf16
from vllm_duck.executor.duck import MoeRequest
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.weights.checkpoint import Checkpoint

NUM_ROWS = 256


def request_for(model_dir: Path) -> MoeRequest:
    model = Checkpoint(model_dir).summary
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((NUM_ROWS, model.hidden_size)).astype(np.float32)
    ids = [rng.permutation(model.n_routed_experts)[:4] for _ in range(NUM_ROWS)]
    return MoeRequest(
        layer_idx=model.layer_ids[0],
        hidden=f32_to_bf16(hidden),
        topk_ids=np.stack(ids).astype(np.int32),
        topk_weights=rng.random((NUM_ROWS, 4)).astype(np.float32),
    )


def sums(model_dir: Path, endpoints: list[str]) -> npt.NDArray[np.float32]:
    """What the ducks answer to one request."""
    with Fleet.connect(endpoints) as fleet:
        return fleet.send(request_for(model_dir)).wait().total


def call_for_ever(model_dir: Path, endpoints: list[str]) -> None:
    request = request_for(model_dir)
    with Fleet.connect(endpoints) as fleet:
        print("ready", flush=True)
        while True:
            pending = [fleet.send(request) for _ in range(8)]
            for each in pending:
                each.wait()


def print_tokens(
    model_dir: Path, endpoints: list[str], full: Sequence[str] = ()
) -> None:
    from testing.answers import MTP1, ask, make_prompts
    from testing.engines import closing_engines, start_engine

    with closing_engines():
        settings = {"endpoints": endpoints, "draft_gate": False}
        llm = start_engine(model_dir, duck=settings, speculative_config=dict(MTP1))
        for each in full:
            _fill(Path(each, "filler"))
        answers = ask(llm, make_prompts(model_dir)[:4], max_tokens=24)
        print(json.dumps([list(each.token_ids) for each in answers]), flush=True)


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


if __name__ == "__main__":
    what, model, ducks = sys.argv[1:]
    run = {
        "calls": call_for_ever,
        "tokens": print_tokens,
        "tokens_without_room": partial(print_tokens, full=("/tmp", "/dev/shm")),
    }[what]
    run(Path(model), ducks.split(","))
