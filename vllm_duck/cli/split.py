"""`vllm-duck split`: one directory for each duck, with what that duck holds."""

import argparse
import shlex
import sys
from pathlib import Path

from vllm_duck.cli import options
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint

_EPILOG = """\
  $ vllm-duck split MODEL OUT --ducks 3                     equal shards
  $ vllm-duck split MODEL OUT --weights 2,1,1               twice the RAM in the first
  $ vllm-duck split MODEL OUT --experts-by 0:128,128:256    whole experts
  $ vllm-duck split MODEL OUT --plan plan.json              as `vllm-duck plan` printed
  $ vllm-duck split MODEL OUT --ducks 3 --weight-format int4    in 0.56 of the bytes

Then copy OUT/duck-1 to the second machine, and there:

  $ vllm-duck serve duck-1 --listen ...

Memory: four expert matrices (60 MB of 7168 x 2048 in fp8), Python and the list of
tensors (100 MB); less than 200 MB in all. With --weight-format two experts and a slice
of each, 250 MB in all. All directories together take what the experts of the checkpoint
take, in that format.

After Ctrl-C or a power cut the same command continues with the first layer that is
not whole. `serve` verifies the checksum of every file as it loads.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "split",
        help="cut a checkpoint into one directory for each duck",
        description="Write OUT/duck-0, OUT/duck-1, ...: the experts that each holds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_model(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write into")
    options.add_split(parser)
    parser.add_argument(
        "--plan", metavar="FILE", help="a shard plan instead of --ducks"
    )
    options.add_weight_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    checkpoint = Checkpoint(args.model)
    plan = options.plan_of(args, checkpoint)
    try:
        report = split_checkpoint(
            checkpoint, plan, args.out, weight_format=args.weight_format
        )
    except KeyboardInterrupt:
        print("stopped; the same command continues the split", file=sys.stderr)
        return 130
    kept = f", kept {options.size(report.num_bytes_kept)}" * bool(report.num_bytes_kept)
    written = options.size(report.num_bytes_written)
    print(f"wrote {written} in {report.seconds:.1f} s{kept}")
    for directory, shard in zip(report.directories, plan.shards, strict=True):
        print(f"{directory}  {shard}")
    first = shlex.quote(str(report.directories[0]))
    print(f"next, on each duck's machine: vllm-duck serve {first} --listen HOST:PORT")
    return 0
