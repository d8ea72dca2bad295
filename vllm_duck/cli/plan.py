"""`vllm-duck plan`: who would hold what, as JSON, and how many bytes that is."""

import argparse
import sys

from vllm_duck.cli import options
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import shard_bytes

_EPILOG = """\
  $ vllm-duck plan MODEL --ducks 32                 equal shards
  $ vllm-duck plan MODEL --ducks 3 --weights 2,1,1  the first machine has twice the RAM

The JSON goes to stdout, the sizes to stderr. A plan may be edited: columns in steps of
16, experts as you like, as long as all shards tile the model; `serve --plan` checks it.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="split a model between ducks",
        description="Print a shard plan, and the bytes of each duck.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_model(parser)
    options.add_split(parser)
    options.add_weight_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checkpoint = Checkpoint(args.model)
    plan = options.make_plan(
        checkpoint,
        num_ducks=args.ducks,
        shares=args.weights,
        expert_ranges=args.experts_by,
    )
    model = checkpoint.summary.requantized(args.weight_format)
    print(plan.to_json(), end="")
    for index, shard in enumerate(plan.shards):
        num_bytes = shard_bytes(model, shard)
        print(f"duck {index}: {options.size(num_bytes)}, {shard}", file=sys.stderr)
    return 0
