"""What a MoE layer costs beyond one in process; what the tail of a step could gain."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.common import Result
from benchmarks.overlap.engine import (
    MTP1,
    NUM_TURNS,
    Engine,
    ducks_in_process,
    one_duck,
    one_duck_settings,
)
from benchmarks.peers.grpcio_echo import echoed
from testing.engines import in_fresh_process
from vllm_duck.executor.duck import FanOut
from vllm_duck.executor.fleet import Fleet


def depth(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    us = in_fresh_process(measure_layer_us, model_dir, num_tokens)
    for transport, target in (
        ("native", "<= 100 us"),
        ("grpcio", "<= 250 us"),
        # No codec, no kernel: what grpcio itself takes of that.
        ("a bare grpcio echo", ""),
    ):
        yield Result(
            f"58 MoE layers over {transport}, beyond in process",
            "us_per_layer",
            us[transport] - us["in process"],
            "us",
            "in process",
            us["in process"],
            target=target,
        )


def measure_layer_us(model_dir: Path, num_tokens: int) -> dict[str, float]:
    """A token's time over the MoE layers; one engine, whose ducks take turns."""
    with contextlib.ExitStack() as stack:
        in_process = ducks_in_process(model_dir)
        fleets: dict[str, Fleet | FanOut] = {"in process": in_process}
        fleets["a bare grpcio echo"] = stack.enter_context(echoed(in_process))
        for transport in ("native", "grpcio"):
            fleet = stack.enter_context(one_duck(model_dir, transport))
            fleets[transport] = fleet
            endpoints = [duck.name for duck in fleet.statistics()]
        # Which ones is of no matter: they are exchanged before the first step.
        engine = Engine(model_dir, {"endpoints": endpoints}, None)
        seconds: dict[str, list[float]] = {name: [] for name in fleets}
        for _ in range(NUM_TURNS):
            for name, fleet in fleets.items():
                engine.runner.attach_ducks(fleet)
                engine.decode(4)
                tok_s = engine.decode(num_tokens // NUM_TURNS)["tok_s"]
                seconds[name].append(1 / tok_s)
    return {
        name: 1e6 * median(turns) / engine.num_sparse_layers
        for name, turns in seconds.items()
    }


def tail(name: str, model_dir: Path, num_tokens: int) -> Iterator[Result]:
    """What going ahead with lane 0 can bring to waits and MTP layer, of a step.

    Beside that, LM head and sampler could run for lane 0 while lane 1 is at the ducks;
    but they take both rows at once as quickly as one, and would have to run twice.
    """
    times = in_fresh_process(measure_tail, model_dir, num_tokens)
    alpha = times["acceptance"]
    saved_s = (1 - alpha) * times["window_s"] + alpha * times["row_s"]
    yield Result(f"{name} tail of a pair", "saved_share", saved_s / times["step_s"], "")


def measure_tail(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, one_duck_settings(), MTP1)
    engine.decode(16)
    return engine.tail(num_tokens)
