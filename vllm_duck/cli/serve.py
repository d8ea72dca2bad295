"""`vllm-duck serve`: load one shard and serve it until it is told to stop."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_duck.cli import options
from vllm_duck.cli.stopping import StopRequest
from vllm_duck.endpoints import UNIX_PREFIX
from vllm_duck.errors import DuckConfigError, DuckError
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.serve.local import FAILED_PREFIX, PRIVATE_PREFIX, READY
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.split.format import is_split_directory
from vllm_duck.executor.split.loader import SplitDirectory
from vllm_duck.executor.system.cpus import set_thread_cpus
from vllm_duck.executor.system.process import reset_memory_policy
from vllm_duck.executor.transports import AnyServer, choose_transport
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import LoadedShard, load_shard
from vllm_duck.executor.wire.security import ServerSecurity

_STOP_GRACE_S = 5.0

_EPILOG = """\
Two ducks on two machines of a trusted network, with a shared secret:

  duck-a$ vllm-duck serve MODEL --shard 0/2 --listen 0.0.0.0:7100 --token-file secret
  duck-b$ vllm-duck serve MODEL --shard 1/2 --listen 0.0.0.0:7100 --token-file secret

From a directory that `vllm-duck split` made for this duck:

  duck-a$ vllm-duck serve OUT/duck-0 --listen ...

Unequal machines, with a plan that all of them have:

  $ vllm-duck plan MODEL --ducks 3 --weights 2,1,1 > plan.json
  duck-a$ vllm-duck serve MODEL --plan plan.json --index 0 --listen ...

Ctrl-C or SIGTERM answers what has arrived and ends with exit code 0.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run one duck",
        description="Load one shard of the routed experts and serve it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_model(parser)
    shard = parser.add_argument_group(
        "what it holds (one of the three ways; a split directory says it itself)"
    )
    shard.add_argument(
        "--shard", type=_fraction, metavar="I/N", help="the I-th of N equal shards"
    )
    shard.add_argument("--plan", metavar="FILE", help="a shard plan, with --index")
    shard.add_argument("--index", type=int, metavar="I", help="position in the plan")
    shard.add_argument(
        "--columns", type=options.int_range, metavar="LO:HI", help="expert columns"
    )
    shard.add_argument(
        "--experts",
        type=options.int_range,
        metavar="LO:HI",
        help="experts, with --columns (default: all)",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:7100",
        metavar="ENDPOINT",
        help="host:port (port 0: any free one) or unix:/path (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=options.positive_int,
        metavar="N",
        help="threads of the kernel (default: one for each physical core, within the "
        "container's quota)",
    )
    parser.add_argument(
        "--max-message-mib",
        type=options.positive_int,
        default=256,
        metavar="MIB",
        help="largest message taken: rows x hidden_size x 2 bytes of a prefill chunk "
        "(default: %(default)s)",
    )
    options.add_weight_format(parser)
    options.add_transport(parser)
    options.add_server_security(parser)
    # For LocalDucks: stop when stdin closes, say on stdout how the start went, and
    # shed what the parent's process was bound to.
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cpus", type=options.cpu_set, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stop = StopRequest()
    if not args.child:
        return _serve(args, stop)
    set_thread_cpus(args.cpus)
    reset_memory_policy()
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        return _serve(args, stop)
    except DuckError as error:
        print(f"{FAILED_PREFIX}{error}", flush=True)
        return 1


def _serve(args: argparse.Namespace, stop: StopRequest) -> int:
    with stop.raising():
        server, transport, moe = _load(args)
    server.start()
    try:
        _announce(args, server.endpoint, transport, moe)
        stop.wait()
    finally:
        server.stop(_STOP_GRACE_S)
        if args.child:
            _remove_private_directory(server.endpoint)
    return 0


def _load(args: argparse.Namespace) -> tuple[AnyServer, str, ShardMoe]:
    security = ServerSecurity.from_files(
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_ca=args.tls_ca,
        token_file=args.token_file,
        is_insecure=args.insecure,
    )
    security.check_listen(args.listen)
    has_tls = security.tls_cert is not None
    choice = choose_transport(args.transport, has_tls=has_tls)
    kernel = MoeKernel(num_threads=args.threads, pin=not args.child)
    moe = ShardMoe(_load_weights(args, kernel), kernel)
    server = choice.transport.make_server(
        moe,
        listen=args.listen,
        security=security,
        max_message_bytes=args.max_message_mib * 2**20,
    )
    return server, choice.reason, moe


def _load_weights(args: argparse.Namespace, kernel: MoeKernel) -> LoadedShard:
    how: dict[str, Any] = {
        "weight_format": args.weight_format,
        "place": kernel.place,
        "show_progress": not args.child,
    }
    if not is_split_directory(args.model):
        checkpoint = Checkpoint(args.model)
        shard = _shard(args, checkpoint)
        return load_shard(checkpoint, shard, **how)
    if any(value is not None for value in _ways(args)):
        raise DuckConfigError(
            f"{args.model} holds one duck's split, which says what the duck holds; "
            "leave out --shard, --plan and --columns"
        )
    return SplitDirectory(args.model).load(**how)


def _ways(args: argparse.Namespace) -> list[object]:
    """What the three ways to say a shard were given."""
    return [args.shard, args.plan, args.columns]


def _shard(args: argparse.Namespace, checkpoint: Checkpoint) -> Shard:
    num_ways = sum(value is not None for value in _ways(args))
    if num_ways != 1:
        raise DuckConfigError(
            "say what the duck holds in one way: --shard I/N, or --plan FILE with "
            f"--index I, or --columns LO:HI; got {num_ways} of them"
        )
    if args.columns is not None:
        experts = args.experts or (0, checkpoint.n_routed_experts)
        return Shard(*args.columns, *experts)
    if args.plan is not None:
        plan = options.read_plan(args.plan, checkpoint)
        index, option = args.index, "--index"
    else:
        index, num_ducks = args.shard
        option = "I of --shard I/N"
        plan = options.make_plan(checkpoint, num_ducks=num_ducks)
    if index is None or not 0 <= index < len(plan.shards):
        raise DuckConfigError(
            f"{option} must be in [0, {len(plan.shards)}), got {index}"
        )
    return plan.shards[index]


def _announce(
    args: argparse.Namespace, endpoint: str, transport: str, moe: ShardMoe
) -> None:
    if args.child:
        print(READY, flush=True)
        return
    info = moe.info
    print(
        f"duck {endpoint} serves {info.shard} of {len(info.layer_ids)} layers: read "
        f"{moe.num_bytes_read / 1e6:.1f} MB, holds {info.weight_bytes / 1e6:.1f} MB "
        f"{info.weight_format}, {info.num_threads} threads, {info.isa}, over "
        f"{transport}. Ctrl-C ends it.",
        flush=True,
    )


def _stop_with_parent() -> None:
    """Wait until the parent closes our stdin, or is gone, and do what SIGTERM does.

    Nobody would notice an orphan that hangs on its way out, so there is a last resort.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
    main_thread_id = threading.main_thread().ident
    assert main_thread_id is not None
    signal.pthread_kill(main_thread_id, signal.SIGTERM)
    time.sleep(2 * _STOP_GRACE_S)
    os._exit(1)


def _remove_private_directory(endpoint: str) -> None:
    """The last duck of a parent that was killed leaves its directory empty."""
    directory = Path(endpoint.removeprefix(UNIX_PREFIX)).parent
    # A directory that a user named for the sockets stays.
    is_private = directory.name.startswith(PRIVATE_PREFIX)
    if endpoint.startswith(UNIX_PREFIX) and is_private:
        with contextlib.suppress(OSError):
            directory.rmdir()


def _fraction(text: str) -> tuple[int, int]:
    """Read "I/N"."""
    index, separator, num_ducks = text.partition("/")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be I/N, as in 0/2, got {text!r}")
    return int(index), options.positive_int(num_ducks)
