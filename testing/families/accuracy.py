"""How close the engine's logits are to transformers' fp32 run, on the tiny GLM-5.2.

    python -m testing.families.accuracy

Teacher-forced over random tokens. The yardstick is what transformers' own bf16 run
loses against its fp32 run. An untrained indexer has near-ties everywhere: in long
sequences most of an error is another key at the edge of a selection, on both sides.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from testing.engines import duck_logits, in_fresh_process
from testing.families import glm
from testing.families.glm_oracle import GlmOracle, write_exact

LENGTHS = (glm.TOPK, 100, 200, 400, 700)
TOKENIZER_OF = Path(__file__).parent.parent.parent / "models" / "tiny-v32"


def main() -> None:
    sequences = [_random_ids(length) for length in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        model = glm.write_checkpoint(Path(folder) / "model", TOKENIZER_OF)
        exact_dir = write_exact(model, Path(folder) / "exact")
        exact, rounded = in_fresh_process(_peer_logits, exact_dir, sequences)
        ours = {
            dtype: in_fresh_process(duck_logits, model, sequences, kv_cache_dtype=dtype)
            for dtype in ("bfloat16", "fp8")
        }
    print("tokens, then median error and same first token: bf16 caches, fp8, peer bf16")
    for i, length in enumerate(LENGTHS):
        cells = [ours["bfloat16"][i], ours["fp8"][i], rounded[i]]
        print(f"{length:6}  " + "   ".join(_text(each, exact[i]) for each in cells))


def _random_ids(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    size = (length,)
    return torch.randint(
        4, glm.CONFIG["vocab_size"], size, generator=generator
    ).tolist()


def _peer_logits(
    exact_dir: Path, sequences: Sequence[list[int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """In fp32, and in bf16."""
    oracles = (GlmOracle(exact_dir), GlmOracle(exact_dir, torch.bfloat16))
    exact, rounded = ([o.logits(s).float() for s in sequences] for o in oracles)
    return exact, rounded


def _text(logits: Tensor, exact: Tensor) -> str:
    got = torch.as_tensor(logits)
    errors = (got - exact).norm(dim=1) / exact.norm(dim=1)
    share = (got.argmax(1) == exact.argmax(1)).float().mean()
    return f"{float(errors.median()):.4f} {100 * float(share):5.1f} %"


if __name__ == "__main__":
    main()
