"""`vllm-duck status`: what each duck says of itself."""

import argparse
import sys

from vllm_duck.cli import options
from vllm_duck.endpoints import replicas_of
from vllm_duck.errors import DuckConfigError, DuckTransportError
from vllm_duck.executor.duck import DuckInfo
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.wire.security import ClientSecurity

_EPILOG = """\
  $ vllm-duck status duck-a:7100 duck-b:7100 --token-file secret
  $ vllm-duck status                   those of VLLM_DUCK_ENDPOINTS

Exit code 1 if a duck does not answer or does not serve. Whether the ducks fit together
is checked by the host when it starts.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "status",
        help="ask ducks what they hold",
        description="Print what each duck holds, and whether it serves.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("endpoints", metavar="ENDPOINT", nargs="*")
    parser.add_argument(
        "--deadline-s",
        type=float,
        default=5.0,
        metavar="S",
        help="how long to wait for each duck (default: %(default)s)",
    )
    options.add_client_security(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    endpoints = args.endpoints or options.default_endpoints()
    if not endpoints:
        raise DuckConfigError("name an endpoint, or set VLLM_DUCK_ENDPOINTS")
    replicas = [each for duck in endpoints for each in replicas_of(duck)]
    security = options.client_security(args)
    are_well = [
        _print_status(endpoint, args.deadline_s, security) for endpoint in replicas
    ]
    return 0 if all(are_well) else 1


def _print_status(endpoint: str, deadline_s: float, security: ClientSecurity) -> bool:
    duck = GrpcDescriber(endpoint, deadline_s=deadline_s, security=security)
    try:
        info = duck.describe()
        health = duck.health()
    except DuckTransportError as error:
        print(error, file=sys.stderr)
        return False
    print(f"{endpoint}  {health}\n{_describe(info)}")
    return health == "SERVING"


def _describe(info: DuckInfo) -> str:
    layers = info.layer_ids
    return "\n".join(
        f"  {what:<12}{value}"
        for what, value in (
            ("protocol", info.protocol_version),
            ("model", info.model_fingerprint),
            ("layers", f"{len(layers)}: {', '.join(map(str, layers))}"),
            ("shard", info.shard),
            ("weights", f"{info.weight_bytes / 1e6:.1f} MB {info.weight_format}"),
            ("memory", f"{info.resident_bytes / 1e6:.1f} MB"),
            ("kernel", f"{info.isa}, {info.num_threads} threads"),
        )
    )
