"""The command that makes the bundled checkpoint: python -m training.make FOLDER."""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

from training.config import TinyConfig
from training.corpus import Corpus
from training.export import export
from training.schedule import ROUNDS
from training.train import Budget, Run, train

DESCRIPTION = """
Make the tiny DeepSeek-V3.2 checkpoint from nothing: read Python's own documentation
out of this interpreter, generate the problems, fit the tokenizer, train trunk, MTP
layer and indexer on the CPU, and write the official fp8 format. Nothing is downloaded.
"""
EXAMPLES = """
examples:
  python -m training.make models/tiny-v32              the bundled checkpoint
  python -m training.make /tmp/quick --minutes 5       a rough one, to try a change
  python -m training.make /tmp/bf16 --bf16             the same without fp8 blocks

then measure it:
  python -m training.evaluate models/tiny-v32

A CPU without bf16 matrix instructions (AMX or AVX-512 bf16) takes several times as
long. On a busy machine set OMP_WAIT_POLICY=PASSIVE: spinning threads lose far more
than the share of the CPU that is taken.
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.make",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    length = parser.add_mutually_exclusive_group()
    default_steps = [round_.num_steps for round_ in ROUNDS]
    length.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=default_steps,
        metavar="N",
        help="optimizer steps of 4096 tokens of the two rounds, or of the first alone "
        f"(default {default_steps})",
    )
    length.add_argument(
        "--minutes",
        type=float,
        help="stop after this time instead; the result then depends on the machine",
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads (default %(default)s)"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="write bf16 weights, not fp8 blocks"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    corpus, config = Corpus(), TinyConfig()
    tokenizer = corpus.fit_tokenizer(config.vocab_size)
    run = train(config, corpus, tokenizer, budgets(args), seed=args.seed)
    export(run.model, tokenizer, args.folder, fp8=not args.bf16)
    facts = run_facts(run, corpus, args.seed)
    (args.folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"wrote {args.folder}: {facts}", file=sys.stderr)


def budgets(args: argparse.Namespace) -> list[Budget]:
    """Return the budget of each round; minutes are shared out by the usual steps."""
    if args.minutes is None:
        return [Budget(num_steps=steps) for steps in args.steps]
    total = sum(round_.num_steps for round_ in ROUNDS)
    share_s = args.minutes * 60 / total
    return [
        Budget(num_steps=round_.num_steps, limit_s=share_s * round_.num_steps)
        for round_ in ROUNDS
    ]


def run_facts(run: Run, corpus: Corpus, seed: int) -> dict[str, str | int | float]:
    """Return what a model card needs to say how the weights came about."""
    return {
        "corpus_digest": corpus.digest(),
        "python": platform.python_version(),
        "seed": seed,
        "steps": run.num_steps,
        "tokens": run.num_tokens,
        "torch": torch.__version__,
        "wall_minutes": round(run.wall_s / 60, 1),
    }


if __name__ == "__main__":
    main()
