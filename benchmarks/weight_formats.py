"""What --weight-format costs in quality and saves in RAM, on the bundled checkpoint.

The same texts (chains, documentation, held-out text) teacher-forced through engines
whose local ducks hold the experts as the checkpoint has them (fp8), in int8 and in
int4; everything else is the same. KL is from the fp8 run to the other, in nats a token;
a token counts as agreeing when both runs rank the same token first. The peer's value is
the next token's loss with fp8.

The bundled model says what these formats do to a small model; the real one is not
measured.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.accuracy import agreement
from benchmarks.common import MODEL_DIR, Result, main
from testing.engines import duck_logits, in_fresh_process
from testing.texts import teacher_forced_texts
from vllm_duck.executor.duck import REQUANTIZED_FORMATS, Shard
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import shard_bytes


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    yield from sizes(model_dir)
    texts = teacher_forced_texts(model_dir, 700 if quick else 4000)
    sequences = [sequence for kind in texts.values() for sequence in kind]
    as_is = in_fresh_process(duck_logits, model_dir, sequences)
    for choice in REQUANTIZED_FORMATS:
        got = in_fresh_process(
            duck_logits,
            model_dir,
            sequences,
            additional_config={"duck": {"local_weight_format": choice}},
        )
        at = 0
        for kind, group in texts.items():
            rows = slice(at, at + len(group))
            at += len(group)
            yield from compare(choice, kind, group, as_is[rows], got[rows])


def sizes(model_dir: Path) -> Iterator[Result]:
    """Bytes of all routed experts."""
    model = Checkpoint(model_dir).summary
    whole = Shard(0, model.moe_intermediate_size, 0, model.n_routed_experts)
    for choice in REQUANTIZED_FORMATS:
        yield Result(
            case=f"{choice}, all routed experts",
            metric="weight_bytes",
            value=shard_bytes(model.requantized(choice), whole) / 1e6,
            unit="MB",
            peer=model.weight_format,
            peer_value=shard_bytes(model, whole) / 1e6,
        )


def compare(
    choice: str,
    kind: str,
    sequences: list[list[int]],
    as_is: list[np.ndarray],
    got: list[np.ndarray],
) -> Iterator[Result]:
    expected, logits = np.concatenate(as_is), np.concatenate(got)
    case = f"{choice}, {kind}, {len(expected)} tokens"
    yield Result(
        case=case,
        metric="kl_to_fp8",
        value=float(_kl(expected, logits).mean()),
        unit="nats a token",
    )
    yield Result(
        case=case,
        metric="top1_agreement_with_fp8",
        value=agreement(logits, expected),
        unit="%",
    )
    yield Result(
        case=case,
        metric="next_token_loss",
        value=_loss(sequences, got),
        unit="nats a token",
        peer="fp8",
        peer_value=_loss(sequences, as_is),
    )


def _kl(expected: np.ndarray, logits: np.ndarray) -> np.ndarray:
    p, q = _log_softmax(expected), _log_softmax(logits)
    kl: np.ndarray = (np.exp(p) * (p - q)).sum(-1)
    return kl


def _loss(sequences: list[list[int]], logits: list[np.ndarray]) -> float:
    losses = [
        -_log_softmax(rows[:-1])[np.arange(len(tokens) - 1), tokens[1:]]
        for tokens, rows in zip(sequences, logits, strict=True)
    ]
    return float(np.concatenate(losses).mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


if __name__ == "__main__":
    main("weight_formats", run, __doc__)
