"""`vllm-duck up`: all ducks of a model on this machine, until Ctrl-C."""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from vllm_duck.cli import options
from vllm_duck.cli.stopping import StopRequest
from vllm_duck.endpoints import UNIX_PREFIX, check_endpoint, join_host_port
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.split.format import Manifest, split_directories
from vllm_duck.executor.system.cpus import thread_cpus
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.plan import ShardPlan

_POLL_S = 0.2

_EPILOG = """\
  $ vllm-duck up MODEL --ducks 2
  VLLM_DUCK_ENDPOINTS=unix:/tmp/vllm-duck-x/0,unix:/tmp/vllm-duck-x/1

From the directories that `vllm-duck split MODEL OUT` made: `vllm-duck up OUT`.

In another terminal, that line before the command:

  $ VLLM_DUCK_ENDPOINTS=... vllm serve MODEL \\
      --speculative-config '{"method": "duck_mtp1"}'

`vllm serve` without it starts two ducks by itself; `up` keeps them loaded between runs.
If one duck ends, `up` says which, ends the others, and exits with code 1.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "up",
        help="run all ducks on this machine",
        description="Start all ducks of a model on this machine; Ctrl-C ends them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_model(parser)
    options.add_split(parser)
    parser.add_argument(
        "--plan", metavar="FILE", help="a shard plan instead of --ducks"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--listen-dir",
        metavar="DIR",
        help="directory for the sockets (default: a private temporary one)",
    )
    where.add_argument(
        "--first-port",
        type=options.positive_int,
        metavar="PORT",
        help="listen on this TCP port of --host and the ones after it instead",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address for --first-port (%(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=options.positive_int,
        metavar="N",
        help="kernel threads of each duck (default: the cpus, or the container's "
        "quota, over the ducks)",
    )
    options.add_weight_format(parser)
    options.add_transport(parser)
    options.add_server_security(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = _plan(args)
    num_ducks = len(plan.shards)
    listen = _listen(args, num_ducks)
    _check_listed(listen or [f"{UNIX_PREFIX}{tempfile.gettempdir()}"])
    print(f"loading {num_ducks} ducks ...", file=sys.stderr, flush=True)
    stop = StopRequest()
    with stop.raising():
        ducks = LocalDucks.start(
            args.model,
            plan=plan,
            num_threads=args.threads,
            listen=listen,
            # What the user's taskset allows, not the whole machine.
            cpus=thread_cpus(),
            weight_format=args.weight_format,
            serve_flags=[f"--transport={args.transport}", *_security_flags(args)],
        )
    with ducks:
        listed = shlex.quote(",".join(ducks.endpoints))
        print(f"VLLM_DUCK_ENDPOINTS={listed}", flush=True)
        print(
            "ready: put that line in front of `vllm serve MODEL`; Ctrl-C here ends the "
            "ducks",
            file=sys.stderr,
            flush=True,
        )
        while (message := ducks.dead()) is None:
            if stop.wait(_POLL_S):
                return 0
    print(f"vllm-duck: error: {message}; stopped the others", file=sys.stderr)
    return 1


def _plan(args: argparse.Namespace) -> ShardPlan:
    directories = split_directories(args.model)
    if not directories:
        return options.plan_of(args, Checkpoint(args.model))
    if (args.plan, args.ducks, args.weights, args.experts_by) != (None,) * 4:
        raise DuckConfigError(
            f"{args.model} is split already, which says what each duck holds; leave "
            "out --ducks, --weights, --experts-by and --plan"
        )
    return Manifest.read(directories[0]).plan


def _listen(args: argparse.Namespace, num_ducks: int) -> list[str] | None:
    if args.first_port is not None:
        host = args.host.removeprefix("[").removesuffix("]")
        ports = range(args.first_port, args.first_port + num_ducks)
        return [check_endpoint(join_host_port(host, port)) for port in ports]
    if args.listen_dir is not None:
        directory = Path(args.listen_dir).resolve()
        endpoints = [
            check_endpoint(f"{UNIX_PREFIX}{directory}/duck{index}")
            for index in range(num_ducks)
        ]
        directory.mkdir(parents=True, exist_ok=True)
        return endpoints
    return None


def _check_listed(endpoints: list[str]) -> None:
    """Refuse a path that VLLM_DUCK_ENDPOINTS cannot hold."""
    for endpoint in endpoints:
        if "," in endpoint:
            raise DuckConfigError(
                "a socket's path must have no comma, since commas separate the "
                f"endpoints in VLLM_DUCK_ENDPOINTS, got {endpoint!r}; choose another "
                "directory with --listen-dir or TMPDIR"
            )


def _security_flags(args: argparse.Namespace) -> list[str]:
    flags = []
    for name in ("token_file", "tls_cert", "tls_key", "tls_ca"):
        value = getattr(args, name)
        if value is not None:
            flags.append(f"--{name.replace('_', '-')}={value}")
    if args.insecure:
        flags.append("--insecure")
    return flags
