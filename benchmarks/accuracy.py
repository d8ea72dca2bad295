"""How close the engine's logits are to transformers' fp32 run of the same weights.

Teacher-forced over chains, documentation and held-out text. The yardstick is what
transformers' own bf16 run loses against its fp32 run: bf16 is what engines compute in.
A token counts as agreeing when both rank the same token first; where they do not, the
gap in the fp32 logits says whether it was a near-tie.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main
from benchmarks.engines import duck_logits, in_fresh_process
from benchmarks.texts import teacher_forced_texts

# Top-1 agreement with fp8 caches that each kind should reach, per cent.
AGREEMENT_TARGETS = {"chains": 99.5, "documentation": 98.0, "held-out text": 96.5}
ERROR_RATIO_TARGET = 1.5


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    texts = teacher_forced_texts(model_dir, 700 if quick else 2000)
    sequences = [sequence for kind in texts.values() for sequence in kind]
    exact, rounded = in_fresh_process(transformers_logits, model_dir, sequences)
    ours = in_fresh_process(
        duck_logits, model_dir, sequences, kv_cache_dtype="bfloat16"
    )
    ours_fp8 = in_fresh_process(duck_logits, model_dir, sequences)
    at = 0
    for kind, group in texts.items():
        rows = slice(at, at + len(group))
        at += len(group)
        yield from _compare(
            kind,
            np.concatenate(exact[rows]),
            np.concatenate(rounded[rows]),
            np.concatenate(ours[rows]),
            np.concatenate(ours_fp8[rows]),
        )


def _compare(
    kind: str,
    exact: np.ndarray,
    rounded: np.ndarray,
    ours: np.ndarray,
    ours_fp8: np.ndarray,
) -> Iterator[Result]:
    case = f"{kind}, {len(exact)} tokens"
    peer = "transformers bf16"
    yield Result(
        case=case,
        metric="logit_error_bf16_kv",
        value=rms_error(ours, exact),
        unit="rms",
        peer=peer,
        peer_value=rms_error(rounded, exact),
        target=f"ratio <= {ERROR_RATIO_TARGET}",
    )
    yield Result(
        case=case,
        metric="logit_error_fp8_kv",
        value=rms_error(ours_fp8, exact),
        unit="rms",
        peer=peer,
        peer_value=rms_error(rounded, exact),
    )
    yield Result(
        case=case,
        metric="top1_agreement_bf16_kv",
        value=agreement(ours, exact),
        unit="%",
        peer=peer,
        peer_value=agreement(rounded, exact),
    )
    yield Result(
        case=case,
        metric="top1_agreement_fp8_kv",
        value=agreement(ours_fp8, exact),
        unit="%",
        peer=peer,
        peer_value=agreement(rounded, exact),
        target=f">= {AGREEMENT_TARGETS[kind]} %",
    )
    gaps = tie_gaps(ours_fp8, exact)
    yield Result(
        case=case,
        metric="worst_disagreement_gap",
        value=float(gaps.max(initial=0.0)),
        unit=f"logits, {len(gaps)} tokens",
        peer=peer,
        peer_value=float(tie_gaps(rounded, exact).max(initial=0.0)),
    )


def rms_error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((logits - exact) ** 2)))


def agreement(logits: np.ndarray, exact: np.ndarray) -> float:
    """Per cent of rows whose best token is the same."""
    return float(np.mean(logits.argmax(-1) == exact.argmax(-1)) * 100)


def tie_gaps(logits: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """For each row with another best token: how far apart fp32 sees the two."""
    picked, best = logits.argmax(-1), exact.argmax(-1)
    (rows,) = np.nonzero(picked != best)
    gaps: np.ndarray = exact[rows, best[rows]] - exact[rows, picked[rows]]
    return gaps


def transformers_logits(
    model_dir: Path, sequences: Sequence[Sequence[int]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Teacher-forced logits in fp32 and in bf16, [T, vocab] fp32 per sequence."""
    import torch

    from benchmarks.oracle import load_transformers, write_dequantized

    results = []
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint_dir = write_dequantized(model_dir, Path(directory), dtype)
            model = load_transformers(checkpoint_dir, dtype)
        with torch.inference_mode():
            results.append(
                [model(torch.tensor([s])).logits[0].float().numpy() for s in sequences]
            )
    return results[0], results[1]


if __name__ == "__main__":
    main("accuracy", run, __doc__)
