"""How close the engine's logits are to transformers' fp32 run of the same weights.

Teacher-forced over chains, documentation and held-out text. The yardstick is what
transformers' own bf16 run loses against its fp32 run: bf16 is what engines compute in.
A token counts as agreeing when both rank the same token first; where they do not, the
gap in the fp32 logits says whether it was a near-tie.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main
from testing.engines import duck_logits, in_fresh_process
from testing.oracle import transformers_logits
from testing.texts import teacher_forced_texts

# Of logits [T, vocab] against exact ones.
Measure = Callable[[np.ndarray, np.ndarray], float]

# Top-1 agreement with fp8 caches that each kind should reach, per cent.
AGREEMENT_TARGETS = {"chains": 99.5, "documentation": 98.0, "held-out text": 96.5}
ERROR_RATIO_TARGET = 1.5


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    texts = teacher_forced_texts(model_dir, 700 if quick else 2000)
    sequences = [sequence for kind in texts.values() for sequence in kind]
    exact, rounded = in_fresh_process(transformers_logits, model_dir, sequences)
    ours = {
        "bf16": in_fresh_process(
            duck_logits, model_dir, sequences, kv_cache_dtype="bfloat16"
        ),
        "fp8": in_fresh_process(duck_logits, model_dir, sequences),
    }
    at = 0
    for kind, group in texts.items():
        rows = slice(at, at + len(group))
        at += len(group)
        yield from _compare(
            kind,
            np.concatenate(exact[rows]),
            np.concatenate(rounded[rows]),
            {kv: np.concatenate(logits[rows]) for kv, logits in ours.items()},
        )


def _compare(
    kind: str,
    exact: np.ndarray,
    rounded: np.ndarray,
    ours: Mapping[str, np.ndarray],
) -> Iterator[Result]:
    """ours: by the dtype of the KV caches."""

    def result(
        metric: str, kv: str, measure: Measure, unit: str, target: str
    ) -> Result:
        return Result(
            case=f"{kind}, {len(exact)} tokens",
            metric=f"{metric}_{kv}_kv",
            value=measure(ours[kv], exact),
            unit=unit,
            peer="transformers bf16",
            peer_value=measure(rounded, exact),
            target=target,
        )

    for kv, logits in ours.items():
        is_bf16 = kv == "bf16"
        error_target = f"ratio <= {ERROR_RATIO_TARGET}" if is_bf16 else ""
        agreement_target = "" if is_bf16 else f">= {AGREEMENT_TARGETS[kind]} %"
        yield result("logit_error", kv, rms_error, "rms", error_target)
        yield result("top1_agreement", kv, agreement, "%", agreement_target)
        unit = f"logits, {len(tie_gaps(logits, exact))} tokens"
        yield result("worst_disagreement", kv, worst_gap, unit, "")


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


def worst_gap(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(tie_gaps(logits, exact).max(initial=0.0))


if __name__ == "__main__":
    main("accuracy", run, __doc__)
