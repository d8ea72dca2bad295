"""`vllm-duck status`: what each duck says of itself."""

import argparse
import sys
import time
from collections.abc import Mapping

import numpy as np

from vllm_duck.cli import options
from vllm_duck.endpoints import replicas_of
from vllm_duck.errors import DuckConfigError, DuckTransportError
from vllm_duck.executor.duck import (
    DuckInfo,
    DuckStatistics,
    FanOut,
    ModelSummary,
    MoeRequest,
)
from vllm_duck.executor.grpcio.client import connect
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.slow import slow_ducks
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.security import ClientSecurity

# Calls of one row, to all ducks at once; at least so many however slow they are.
_NUM_CALLS, _MIN_CALLS = 200, 20
_TOPK = 8

_EPILOG = """\
  $ vllm-duck status duck-a:7100 duck-b:7100 --token-file secret
  $ vllm-duck status                   those of VLLM_DUCK_ENDPOINTS

Ducks of one model are timed with small calls, and one that is slow against the others
is named. Exit code 1 if a duck does not answer or does not serve. Whether the ducks fit
together is checked by the host when it starts.
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
    serving = {
        endpoint: info
        for endpoint in replicas
        if (info := _print_status(endpoint, args.deadline_s, security))
    }
    _print_slow(serving, args.deadline_s, security)
    return 0 if len(serving) == len(replicas) else 1


def _print_status(
    endpoint: str, deadline_s: float, security: ClientSecurity
) -> DuckInfo | None:
    """What it holds, if it serves."""
    duck = GrpcDescriber(endpoint, deadline_s=deadline_s, security=security)
    try:
        info = duck.describe()
        health = duck.health()
    except DuckTransportError as error:
        print(error, file=sys.stderr)
        return None
    print(f"{endpoint}  {health}\n{_describe(info)}")
    return info if health == "SERVING" else None


def _print_slow(
    serving: Mapping[str, DuckInfo], deadline_s: float, security: ClientSecurity
) -> None:
    """Time the ducks of each model side by side, and name those that are slow."""
    for model in {info.model for info in serving.values()}:
        ducks = {name: info for name, info in serving.items() if info.model == model}
        if len(ducks) < 2:
            continue
        fan_out = connect(
            list(ducks),
            identities=[identity_of(info) for info in ducks.values()],
            deadline_s=deadline_s,
            reply_dtype="bf16",
            security=security,
            recover_s=0.0,
        )
        try:
            statistics = _timed(fan_out, model, deadline_s)
        except DuckTransportError as error:
            print(error, file=sys.stderr)
            continue
        finally:
            fan_out.close()
        for slow in slow_ducks(statistics, min_calls=_MIN_CALLS):
            print(f"{slow.name}  is slow: {slow}", file=sys.stderr)


def _timed(
    fan_out: FanOut, model: ModelSummary, deadline_s: float
) -> list[DuckStatistics]:
    """All ducks compute the same row, again and again."""
    num_topk = min(_TOPK, model.n_routed_experts)
    request = MoeRequest(
        layer_idx=model.layer_ids[0],
        hidden=np.zeros((1, model.hidden_size), np.uint16),
        topk_ids=np.arange(num_topk, dtype=np.int32)[None],
        topk_weights=np.ones((1, num_topk), np.float32),
    )
    give_up_s = time.monotonic() + deadline_s
    for i in range(_NUM_CALLS):
        fan_out.send(request).wait()
        if i >= _MIN_CALLS and time.monotonic() > give_up_s:
            break
    return fan_out.statistics()


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
