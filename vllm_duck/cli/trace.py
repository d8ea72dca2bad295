"""`vllm-duck trace`: decode some steps and show how the lanes overlap."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_duck.cli import options
from vllm_duck.endpoints import parse_endpoints
from vllm_duck.errors import DuckConfigError

if TYPE_CHECKING:
    from vllm_duck.spec_decode.lanes.times import StepRecord

_EPILOG = """\
  $ vllm-duck trace MODEL
  $ vllm-duck trace MODEL --endpoints duck-a:7100,duck-b:7100 --steps 20

Open the trace in ui.perfetto.dev or chrome://tracing. The picture is of the step that
took the median time.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "trace",
        help="show how the lanes of decode steps overlap",
        description="Decode one prompt with duck_mtp1 and write what each lane did.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory")
    parser.add_argument(
        "--endpoints",
        metavar="LIST",
        default="",
        help="ducks, comma separated (default: VLLM_DUCK_ENDPOINTS, or two local ones)",
    )
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="steps (default: %(default)s)"
    )
    parser.add_argument("--prompt", default="Is 91 prime?", help="what to answer")
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=2048,
        metavar="T",
        help="tokens of prompt and answer (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path("trace.json"),
        help="Chrome trace to write (default: %(default)s)",
    )
    parser.add_argument(
        "--png",
        type=Path,
        default=Path("lanes.png"),
        help="picture to write (default: %(default)s)",
    )
    options.add_client_security(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise DuckConfigError(f"--steps must be >= 1, got {args.steps}")
    options.client_security(args)
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise DuckConfigError(
            "vllm-duck trace runs the host and needs vLLM; pip install vllm-duck[cpu]"
        ) from error
    from vllm_duck.cli.gantt import chrome_trace, draw_step
    from vllm_duck.spec_decode.lanes.times import Overlap, overlap_of

    records, first_layer_idx = _record(args)
    args.trace.write_text(json.dumps(chrome_trace(records, first_layer_idx)))
    by_time = sorted(records, key=lambda record: overlap_of(record).pair_s)
    median = by_time[len(by_time) // 2]
    total = sum((overlap_of(record) for record in records), Overlap())
    saved = f"{overlap_of(median).ratio:.0%} less than serially"
    draw_step(
        median, first_layer_idx, args.png, f"One decode step in two lanes: {saved}"
    )
    print(total)
    print(f"wrote {args.trace} ({len(records)} steps) and {args.png}")
    return 0


def _record(args: argparse.Namespace) -> "tuple[list[StepRecord], int]":
    """The latest of the decode steps in two lanes, and the first layer with ducks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from vllm_duck.spec_decode.lanes.policy import LanePolicy

    endpoints = parse_endpoints(args.endpoints)
    # Every step drafts, whether or not that pays: pairs are what is to be seen.
    names = ("token_file", "tls_ca", "tls_cert", "tls_key")
    duck: dict[str, Any] = {name: getattr(args, name) for name in names}
    duck["draft_gate"] = False
    if endpoints:
        duck["endpoints"] = endpoints
    llm = LLM(
        args.model,
        speculative_config={"method": "duck_mtp1"},
        additional_config={"duck": duck},
        max_model_len=args.max_model_len,
        max_num_seqs=1,
    )
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    sampling = SamplingParams(
        temperature=0.0, max_tokens=4 * args.steps + 16, ignore_eos=True
    )
    # Every step in lanes, for they are what is to be seen.
    runner.lanes.policy = LanePolicy(True, times=None)
    # The first tokens warm up; the prompt is a step of its own.
    llm.generate(args.prompt, SamplingParams(max_tokens=8), use_tqdm=False)
    runner.lanes.meter.num_wanted = 4 * args.steps + 16
    llm.generate(args.prompt, sampling, use_tqdm=False)
    pairs = [r for r in runner.lanes.meter.records[1:] if r.serial_reason is None]
    if not pairs:
        raise DuckConfigError(
            f"{args.model} decoded no step in two lanes: it drafts nothing; "
            f"reasons: {dict(runner.lanes.meter.serial_steps)}"
        )
    return pairs[-args.steps :], runner.model.dims.num_leading_dense
