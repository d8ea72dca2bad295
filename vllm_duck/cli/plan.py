"""`vllm-duck plan`: who would hold what, and what the fleet would do."""

import argparse
import json
import sys
from pathlib import Path

from vllm_duck.cli import options
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import shard_bytes
from vllm_duck.plan.machines import DUCK_CORE_GFLOPS, GPUS, Fleet, find_host
from vllm_duck.plan.prediction import as_table, predict
from vllm_duck.plan.sizes import INT4_BYTES, INT8_BYTES, read_sizes
from vllm_duck.plan.steps import MAX_DRAFTS, Given, Planner

_EPILOG = """\
Who holds what, of a checkpoint:

  $ vllm-duck plan MODEL --ducks 32                 equal shards
  $ vllm-duck plan MODEL --ducks 3 --weights 2,1,1  the first machine has twice the RAM

The JSON goes to stdout, the sizes to stderr. A plan may be edited: columns in steps of
16, experts as you like, as long as all shards tile the model; `serve --plan` checks it.

How fast a fleet would be, of a config.json alone, with --host or --host-gbs:

  $ vllm-duck plan config.json --ducks 32 --duck-gbs 25 --duck-cores 4 \\
      --link-gbps 2.5 --host rtx5090 --acceptance 0.87

docs/planning.md has the formulas, and what they leave out.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="split a model between ducks; predict what a fleet would do",
        description="Print a shard plan and the bytes of each duck; or, with --host or "
        "--host-gbs, what a fleet of equal ducks would do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_model(parser)
    options.add_split(parser)
    options.add_weight_format(parser)
    _add_machines(parser.add_argument_group("what the fleet would do"))
    parser.set_defaults(run=run)


def _add_machines(group: "argparse._ArgumentGroup") -> None:
    def number(flag: str, text: str, default: float | None = None) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        group.add_argument(
            flag,
            type=options.positive_float,
            default=default,
            metavar="X",
            help=text + shown,
        )

    group.add_argument("--host", metavar="GPU", help=f"one of {', '.join(GPUS)}")
    number("--host-gbs", "GB/s of the memory of a CPU host")
    number("--host-gflops", "GFLOP/s of the host in float32 (default: 5 for each GB/s)")
    number("--host-gbps", "Gb/s of the host's ports together (default: all links)")
    number("--duck-gbs", "GB/s of a duck's memory", 25.0)
    group.add_argument(
        "--duck-cores",
        type=options.positive_int,
        default=4,
        metavar="N",
        help=f"cores of a duck of {DUCK_CORE_GFLOPS:g} GFLOP/s (default: %(default)s)",
    )
    number("--duck-gflops", "GFLOP/s of a duck, in place of --duck-cores")
    number("--link-gbps", "Gb/s of a duck's link", 2.5)
    group.add_argument(
        "--acceptance",
        type=_share,
        default=0.85,
        metavar="X",
        help="of a draft, if those before are accepted (default: %(default)s)",
    )
    group.add_argument(
        "--drafts",
        type=_drafts,
        default=None,
        metavar="K",
        help=f"drafts a step, 0 to {MAX_DRAFTS}, or auto: the fastest (default: auto)",
    )
    group.add_argument(
        "--context",
        type=options.positive_int,
        default=4096,
        metavar="T",
        help="context length in tokens (default: %(default)s)",
    )
    number(
        "--host-stage-ms", "measured time of a lane in a layer, in place of its bytes"
    )
    number("--duck-stage-ms", "measured time of a call, there and back, likewise")
    group.add_argument("--json", action="store_true", help="JSON in place of a table")


def run(args: argparse.Namespace) -> int:
    if args.host is not None or args.host_gbs is not None:
        return _predict(args)
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


def _predict(args: argparse.Namespace) -> int:
    if args.weights is not None or args.experts_by is not None:
        raise DuckConfigError(
            "a prediction is of equal ducks; --weights and --experts-by are for the "
            "shard plan, without --host and --host-gbs"
        )
    sizes = read_sizes(Path(args.model))
    host = find_host(args.host, args.host_gbs, args.host_gflops)
    formats = {None: sizes.weight_bytes, "int4": INT4_BYTES, "int8": INT8_BYTES}
    planner = Planner(
        sizes,
        host,
        Fleet(
            num_ducks=args.ducks or 2,
            duck_gbs=args.duck_gbs,
            duck_gflops=args.duck_gflops or args.duck_cores * DUCK_CORE_GFLOPS,
            link_gbps=args.link_gbps,
            host_gbps=args.host_gbps or 0.0,
        ),
        expert_bytes=formats[args.weight_format],
        host_bytes=sizes.weight_bytes,
        acceptance=args.acceptance,
        context=args.context,
        given=Given(_seconds(args.host_stage_ms), _seconds(args.duck_stage_ms)),
    )
    found = predict(planner, args.drafts)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(as_table(found), end="")
        if host.is_gpu:
            print("GPU hosts are not built yet: this is what their bytes allow.")
    return 0


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _drafts(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) > MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"expected 0 to {MAX_DRAFTS} or auto")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return share
