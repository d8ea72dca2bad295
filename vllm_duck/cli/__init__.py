"""The `vllm-duck` command: one module per subcommand."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_duck.errors import DuckError
from vllm_duck.version import __version__

_DOCTOR = "doctor"
_COMMANDS = ("serve", "up", "plan", "split", "status", "trace", "families", _DOCTOR)

_EPILOG = """\
A first try, all on one machine:

  vllm-duck up MODEL --ducks 2

It prints a line VLLM_DUCK_ENDPOINTS=... to put before `vllm serve MODEL`.

On several machines: `vllm-duck plan` says what each duck will hold,
`vllm-duck split` cuts the checkpoint so that each stores only its own,
`vllm-duck serve` runs on each of them, `vllm-duck status` looks at them.
`vllm-duck families` lists the models that are served.
`vllm-duck doctor` tells whether a machine has what it needs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # The doctor comes also where the others lack what they import, and says what.
    commands = (_DOCTOR,) if _DOCTOR in argv[:1] else _COMMANDS
    try:
        parser = _parser(commands)
    except ImportError as error:
        print(
            f"vllm-duck: error: {error}; `vllm-duck {_DOCTOR}` says what to do",
            file=sys.stderr,
        )
        return 1
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 0
    except DuckError as error:
        print(f"vllm-duck: error: {error}", file=sys.stderr)
        return 1


def _parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-duck",
        description="Ducks hold a model's routed experts for vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"vllm_duck {__version__}"
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        import_module(f"vllm_duck.cli.{command}").add_parser(subparsers)
    return parser
