"""The `vllm-duck` command: one module per subcommand."""

import argparse
import sys
from collections.abc import Sequence

from vllm_duck import __version__
from vllm_duck.cli import doctor, plan, serve, split, status, trace, up
from vllm_duck.errors import DuckError

_COMMANDS = (serve, up, plan, split, status, trace, doctor)

_EPILOG = """\
A first try, all on one machine:

  vllm-duck up MODEL --ducks 2

It prints a line VLLM_DUCK_ENDPOINTS=... to put before `vllm serve MODEL`.

On several machines: `vllm-duck plan` says what each duck will hold,
`vllm-duck split` cuts the checkpoint so that each stores only its own,
`vllm-duck serve` runs on each of them, `vllm-duck status` looks at them.
`vllm-duck doctor` tells whether a machine has what it needs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 0
    except DuckError as error:
        print(f"vllm-duck: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-duck",
        description="Ducks hold the routed experts of DeepSeek-V3.2 for vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"vllm_duck {__version__}"
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser
