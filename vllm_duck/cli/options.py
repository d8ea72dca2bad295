"""Options that several subcommands share, and how their values are read."""

import argparse
import math
import os
from pathlib import Path
from typing import get_args

from vllm_duck.config import TransportName, environment_endpoints
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.duck import REQUANTIZED_FORMATS, Shard
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.wire.security import ClientSecurity

DEFAULT_NUM_DUCKS = 2


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory of a checkpoint (config.json and safetensors)",
    )


def add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport",
        choices=get_args(TransportName),
        default="auto",
        help="what carries the calls: the native stream where it can serve, or grpcio "
        "(default: %(default)s)",
    )


def add_server_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "who may call",
        "Sockets and loopback are open to this machine. Any other address needs TLS, "
        "a token, or --insecure.",
    )
    group.add_argument(
        "--token-file", metavar="FILE", help="hosts must send the secret in this file"
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="PEM certificate of this duck; turns TLS on"
    )
    group.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")
    group.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="PEM authority of the hosts: they must show a certificate too",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without TLS or token",
    )


def add_client_security(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", metavar="FILE", help="the ducks' secret")
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM authority; turns TLS on")
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM certificate to show")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM key of --tls-cert")


def client_security(args: argparse.Namespace) -> ClientSecurity:
    """What `add_client_security` was given.

    Raises:
        DuckConfigError: a file cannot be read, or one of them lacks another.
    """
    return ClientSecurity.from_files(
        tls_ca=args.tls_ca,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        token_file=args.token_file,
    )


def add_weight_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weight-format",
        choices=sorted(REQUANTIZED_FORMATS),
        help="re-quantise the experts: int4 takes 0.56 of fp8's RAM, int8 half of "
        "bf16's (default: as the checkpoint has them)",
    )


def add_split(parser: argparse.ArgumentParser) -> None:
    """The options that make a plan for several ducks."""
    parser.add_argument(
        "--ducks", type=positive_int, metavar="N", help="number of ducks (default: 2)"
    )
    parser.add_argument(
        "--weights",
        type=weights,
        metavar="W,W,...",
        help="relative shares, for unequal machines: 2,1,1 gives the first one half",
    )
    parser.add_argument(
        "--experts-by",
        type=int_ranges,
        metavar="LO:HI,LO:HI,...",
        help="one range of whole experts for each duck, in place of columns of "
        "all experts",
    )


def make_plan(
    checkpoint: Checkpoint,
    *,
    num_ducks: int | None,
    shares: list[float] | None = None,
    expert_ranges: list[tuple[int, int]] | None = None,
) -> ShardPlan:
    """Split a model by --ducks and --weights, or by --experts-by; all are optional.

    Raises:
        DuckConfigError: they contradict each other, or do not tile the model.
    """
    if expert_ranges is not None:
        if shares is not None or num_ducks not in (None, len(expert_ranges)):
            raise DuckConfigError(
                "--experts-by already says how many ducks there are and how big"
            )
        num_columns = checkpoint.moe_intermediate_size
        shards = tuple(Shard(0, num_columns, *experts) for experts in expert_ranges)
        return ShardPlan(num_columns, checkpoint.n_routed_experts, shards)
    if num_ducks is None:
        num_ducks = DEFAULT_NUM_DUCKS if shares is None else len(shares)
    return ShardPlan.even(
        num_ducks,
        num_columns=checkpoint.moe_intermediate_size,
        num_experts=checkpoint.n_routed_experts,
        weights=shares,
    )


def plan_of(args: argparse.Namespace, checkpoint: Checkpoint) -> ShardPlan:
    """The plan that --plan, or the options of add_split, ask for.

    Raises:
        DuckConfigError: both do, or what they say does not fit the model.
    """
    if args.plan is None:
        return make_plan(
            checkpoint,
            num_ducks=args.ducks,
            shares=args.weights,
            expert_ranges=args.experts_by,
        )
    if (args.ducks, args.weights, args.experts_by) != (None, None, None):
        raise DuckConfigError(
            "--plan already says how many ducks there are and how big"
        )
    return read_plan(args.plan, checkpoint)


def read_plan(path: str, checkpoint: Checkpoint) -> ShardPlan:
    """Read a plan file and check that it is for this model.

    Raises:
        DuckConfigError: the file is unreadable, no plan, or for other sizes.
    """
    try:
        plan = ShardPlan.from_json(Path(path).read_text())
    except OSError as error:
        raise DuckConfigError(f"cannot read --plan {path}: {error.strerror}") from error
    got = (plan.moe_intermediate_size, plan.n_routed_experts)
    expected = (checkpoint.moe_intermediate_size, checkpoint.n_routed_experts)
    if got != expected:
        raise DuckConfigError(
            f"--plan {path} is for {got[0]} columns and {got[1]} experts, the model "
            f"has {expected[0]} and {expected[1]}; make one with `vllm-duck plan`"
        )
    return plan


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def int_range(text: str) -> tuple[int, int]:
    """Read "LO:HI"."""
    low, separator, high = text.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be LO:HI, got {text!r}")
    return int(low), int(high)


def int_ranges(text: str) -> list[tuple[int, int]]:
    return [int_range(part) for part in text.split(",")]


def weights(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def cpu_set(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


def default_endpoints() -> tuple[str, ...]:
    """What VLLM_DUCK_ENDPOINTS names, as the host reads it."""
    return environment_endpoints(os.environ)


def size(num_bytes: int) -> str:
    """A number of bytes for people."""
    if num_bytes < 100e6:
        return f"{num_bytes / 1e6:.1f} MB"
    return f"{num_bytes / 1e9:.1f} GB"
