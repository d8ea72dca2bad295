"""Tokens a second of one user: through two local ducks, and of the peers.

All sides get the same cores of this machine. transformers runs the same sparse model
in bf16; stock vLLM runs the same weights as a dense deepseek_v3, since it has no
sparse attention on a CPU, with its experts in process.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main
from testing.engines import engine_speed, in_fresh_process, transformers_speed

PROMPT_TOKENS = 1024
VOCAB = range(16, 2000)


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    num_threads = len(os.sched_getaffinity(0))
    num_tokens = 64 if quick else 256
    rng = np.random.default_rng(0)
    prompts = [
        rng.choice(VOCAB, PROMPT_TOKENS).tolist() for _ in range(3 if quick else 7)
    ]
    ours = in_fresh_process(
        engine_speed, model_dir, prompts, num_tokens=num_tokens, duck={}
    )
    with tempfile.TemporaryDirectory() as directory:
        in_fresh_process(write_peers, model_dir, Path(directory))
        stock = in_fresh_process(
            engine_speed,
            Path(directory) / "v3",
            prompts,
            num_tokens=num_tokens,
            duck=None,
        )
        transformers = in_fresh_process(
            transformers_speed,
            Path(directory) / "v32",
            prompts[:2],
            num_tokens=num_tokens // 4,
            num_threads=num_threads,
        )
    case = f"one user, {num_threads} cores, 2 ducks"
    for peer, speed, target in (
        ("transformers generate", transformers, "ratio >= 3"),
        ("stock vLLM dense v3", stock, "ratio >= 0.6"),
    ):
        yield Result(
            case=case,
            metric="decode",
            value=ours.decode_tok_s,
            unit="tok/s",
            peer=peer,
            peer_value=speed.decode_tok_s,
            target=target,
        )
        yield Result(
            case=f"{case}, {PROMPT_TOKENS} tokens",
            metric="prefill",
            value=ours.prefill_tok_s,
            unit="tok/s",
            peer=peer,
            peer_value=speed.prefill_tok_s,
            target="ratio >= 3" if "transformers" in peer else "",
        )


def write_peers(model_dir: Path, directory: Path) -> None:
    import torch

    from testing.oracle import write_dequantized

    write_dequantized(model_dir, directory / "v32", torch.bfloat16)
    write_dequantized(model_dir, directory / "v3", torch.bfloat16, as_dense_v3=True)


if __name__ == "__main__":
    main("speed", run, __doc__)
