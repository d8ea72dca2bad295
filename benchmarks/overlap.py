"""What two lanes bring, in one run each way.

`paced` ducks sleep, so that the ratio of the host's time c to the ducks' time d can be
swept on two cores; `real` ducks compute in processes of their own; `link` puts a paced
duck behind 2.5 Gb/s and 100 us in a network namespace (needs root; left out elsewhere).
Saved share and efficiency are the log line's: of the serial time, and of what a perfect
overlap would save. Tokens a second compare whole engines; the formula is
(1 + acceptance) (c + d) / (2 max(c, d)). The models have random weights and a chosen
acceptance (random_model.py), but for the bundled one. --quick is `paced` and `real` at
c = d; all of it starts 26 engines and takes a quarter of an hour.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import MODEL_DIR, Result, main
from benchmarks.engines import in_fresh_process
from benchmarks.network import delayed, linked_namespace
from benchmarks.overlap_engine import (
    PREFILL_TOKENS,
    Engine,
    fleet_in_process,
    one_duck,
)
from benchmarks.paced_duck import Pace, leave_a_cpu, paced_duck
from benchmarks.random_model import DEEP, WIDE, write_random_model

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
MTP1 = {"method": "duck_mtp1"}
NUM_TURNS = 4


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    num_tokens = 48 if quick else 192
    with tempfile.TemporaryDirectory() as directory:
        wide = write_random_model(WIDE, Path(directory) / "wide")
        yield from _paced(wide, num_tokens, (1.0,) if quick else RATIOS)
        yield from _real(wide, num_tokens)
        if quick:
            return
        yield from _link(wide, num_tokens)
        yield from _whole_engines("wide", wide, num_tokens)
        yield from _tail("wide", wide, num_tokens)
        yield from _whole_engines("bundled", model_dir, 4 * num_tokens)
        yield from _beside_stock(model_dir, Path(directory) / "v3", 4 * num_tokens)
        yield from _gate(Path(directory), num_tokens)
        deep = write_random_model(DEEP, Path(directory) / "deep")
        yield from _depth(deep, num_tokens)


def _paced(
    model_dir: Path, num_tokens: int, ratios: Sequence[float]
) -> Iterator[Result]:
    with paced_duck(model_dir) as (endpoint, pace_file):
        duck = (model_dir, endpoint, pace_file)
        found = in_fresh_process(sweep, *duck, num_tokens, ratios)
        yield from _sweep_results("paced", found)
        # At the pace that the sweep leaves, for a lane's row as for a plain token.
        plain = in_fresh_process(measure_paced, *duck[:2], None, num_tokens)["tok_s"]
        pairs = in_fresh_process(measure_paced, *duck[:2], MTP1, num_tokens)
    c_s, d_s = pairs["stage0_s"], pairs["stage1_s"]
    formula = (1 + pairs["acceptance"]) * (c_s + d_s) / (2 * max(c_s, d_s))
    yield Result(
        f"paced duck_mtp1 with lanes, c = {c_s * 1e3:.2f} ms, d = {d_s * 1e3:.2f} ms",
        "decode",
        pairs["tok_s"],
        "tok/s",
        "plain",
        plain,
        target=f"ratio >= 1.3; formula {formula:.2f}",
    )


def _sweep_results(name: str, found: dict[str, dict[str, float]]) -> Iterator[Result]:
    for case, overlap in found.items():
        is_prefill = case.startswith("prefill")
        if is_prefill:
            yield Result(
                case=f"{name} {case}",
                metric="speed_up",
                value=overlap["speed_up"],
                unit="x",
                target="1.4" if "c:d = 1:1" in case else "",
            )
            continue
        yield Result(
            case=f"{name} {case}",
            metric="efficiency",
            value=overlap["efficiency"],
            unit="",
            target={"paced": ">= 0.90", "real": ">= 0.80"}.get(name, ""),
        )
        yield Result(
            case=f"{name} {case}",
            metric="saved_share",
            value=overlap["ratio"],
            unit="",
            target=">= 0.43" if "1:1" in case and name != "link" else "",
        )


def sweep(
    model_dir: Path,
    endpoint: str,
    pace_file: Path,
    num_tokens: int,
    ratios: Sequence[float] = RATIOS,
) -> dict[str, dict[str, float]]:
    """Decode pairs and a prefill at every ratio of c to d; leaves the pace of 1:1."""
    leave_a_cpu()
    engine = Engine(model_dir, {"endpoints": [endpoint]}, MTP1)
    pace = Pace(pace_file)
    found = {}
    engine.decode(16)
    equal_s = 0.0
    for ratio in ratios:
        times = _settle(engine, pace, ratio, num_tokens)
        if ratio == 1:
            equal_s = pace.call_s
        shown = f"1:{ratio:g}" if ratio >= 1 else f"{1 / ratio:g}:1"
        c_ms, d_ms = times["stage0_s"] * 1e3, times["stage1_s"] * 1e3
        found[f"decode c:d = {shown}, c = {c_ms:.2f} ms, d = {d_ms:.2f} ms"] = times
    pace.call_s = 0.0
    c_s = engine.prefill(PREFILL_TOKENS)["stage0_s"]
    pace.call_s = c_s
    seconds = {}
    for overlaps in (False, True):
        # A half chunk is half the work for a duck, too.
        pace.call_s = c_s if overlaps else 2 * c_s
        engine.set_lanes(overlaps)
        seconds[overlaps] = engine.prefill(PREFILL_TOKENS)["seconds"]
    found[f"prefill of {PREFILL_TOKENS} tokens, c:d = 1:1"] = {
        "speed_up": seconds[False] / seconds[True]
    }
    pace.call_s = equal_s
    return found


def measure_paced(
    model_dir: Path, endpoint: str, speculation: dict[str, str] | None, num_tokens: int
) -> dict[str, float]:
    leave_a_cpu()
    engine = Engine(model_dir, {"endpoints": [endpoint]}, speculation)
    engine.decode(16)
    return engine.decode(num_tokens)


def _settle(
    engine: Engine, pace: Pace, ratio: float, num_tokens: int
) -> dict[str, float]:
    """Bring the pace near d = ratio c; the figures of the decode nearest to it.

    What a call takes beside the sleep, and c beside a busy duck, vary with the pace: so
    it is set by what was measured.
    """
    tries = []
    for _ in range(6):
        times = engine.decode(num_tokens)
        missing_s = ratio * times["stage0_s"] - times["stage1_s"]
        error = abs(missing_s) / times["stage1_s"]
        tries.append((error, pace.call_s, times))
        if error < 0.05:
            break
        pace.call_s = max(0.0, pace.call_s + missing_s)
    _, pace.call_s, times = min(tries, key=lambda each: each[0])
    return times


def _link(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    with contextlib.ExitStack() as stack:
        try:
            address, inside, has_delay = stack.enter_context(linked_namespace())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"link: left out, no network namespace here ({error})")
            return
        duck = f"{address}:7100"
        endpoint, pace_file = stack.enter_context(
            paced_duck(model_dir, listen=duck, prefix=inside)
        )
        if not has_delay:
            endpoint = f"{address}:7101"
            stack.enter_context(delayed(endpoint, duck, inside))
        found = in_fresh_process(sweep, model_dir, endpoint, pace_file, num_tokens)
        yield from _sweep_results("link", found)


def _one_local_duck() -> dict[str, Any]:
    """One thread for the duck; the host has all that vLLM gives it."""
    return {"local_ducks": 1, "local_threads": 1}


def _real(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    found = in_fresh_process(measure_real, model_dir, num_tokens)
    c_ms, d_ms = found["stage0_s"] * 1e3, found["stage1_s"] * 1e3
    case = f"decode, c = {c_ms:.2f} ms, d = {d_ms:.2f} ms"
    yield from _sweep_results("real", {case: found})


def measure_real(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, _one_local_duck(), MTP1)
    engine.decode(16)
    return engine.decode(num_tokens)


def _whole_engines(name: str, model_dir: Path, num_tokens: int) -> Iterator[Result]:
    plain, batch = in_fresh_process(measure_plain, model_dir, num_tokens)
    pairs = in_fresh_process(measure_pairs, model_dir, num_tokens)
    c_s, d_s, alpha = (pairs[k] for k in ("stage0_s", "stage1_s", "acceptance"))
    formula = (1 + alpha) * (c_s + d_s) / (2 * max(c_s, d_s))
    yield Result(
        f"{name} batch 4, lanes", "decode", batch[True], "tok/s", "serial", batch[False]
    )
    yield Result(
        f"{name} duck_mtp1 serial", "decode", pairs["serial"], "tok/s", "plain", plain
    )
    yield Result(
        f"{name} duck_mtp1 with lanes",
        "decode",
        pairs["lanes"],
        "tok/s",
        "plain",
        plain,
        target=f"formula {formula:.2f}",
    )


def measure_choice(model_dir: Path, num_tokens: int) -> float:
    engine = Engine(model_dir, _one_local_duck(), MTP1)
    engine.choose_lanes()
    engine.decode(100)
    return engine.decode(num_tokens)["tok_s"]


def _tail(name: str, model_dir: Path, num_tokens: int) -> Iterator[Result]:
    """What going ahead with lane 0 can bring to waits and MTP layer, of a step.

    Beside that, LM head and sampler could run for lane 0 while lane 1 is at the ducks;
    but they take both rows at once as quickly as one, and would have to run twice.
    """
    times = in_fresh_process(measure_tail, model_dir, num_tokens)
    alpha = times["acceptance"]
    saved_s = (1 - alpha) * times["window_s"] + alpha * times["row_s"]
    yield Result(f"{name} tail of a pair", "saved_share", saved_s / times["step_s"], "")


def measure_tail(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, _one_local_duck(), MTP1)
    engine.decode(16)
    return engine.tail(num_tokens)


def _beside_stock(
    model_dir: Path, dense_dir: Path, num_tokens: int
) -> Iterator[Result]:
    """The same weights as dense deepseek_v3: stock vLLM has the experts in process."""
    in_fresh_process(write_dense, model_dir, dense_dir)
    stock = in_fresh_process(measure_stock, dense_dir, num_tokens)
    always = in_fresh_process(measure_pairs, model_dir, num_tokens)["lanes"]
    chosen = in_fresh_process(measure_choice, model_dir, num_tokens)
    for case, ours, target in (
        ("always in lanes", always, ""),
        ("in lanes where they pay, as by default", chosen, "ratio >= 1"),
    ):
        yield Result(
            f"bundled duck_mtp1, {case}",
            "decode",
            ours,
            "tok/s",
            "vLLM mtp, dense V3",
            stock,
            target=target,
        )


def write_dense(model_dir: Path, dense_dir: Path) -> None:
    import torch

    from benchmarks.oracle import write_dequantized

    write_dequantized(
        model_dir, dense_dir, torch.bfloat16, as_dense_v3=True, with_mtp=True
    )


def measure_stock(dense_dir: Path, num_tokens: int) -> float:
    engine = Engine(dense_dir, None, {"method": "mtp", "num_speculative_tokens": 1})
    engine.decode(16)
    return engine.decode(num_tokens)["tok_s"]


def measure_plain(model_dir: Path, num_tokens: int) -> tuple[float, dict[bool, float]]:
    engine = Engine(model_dir, _one_local_duck(), None)
    engine.decode(16)
    plain = engine.decode(num_tokens)["tok_s"]
    engine.decode(8, batch=4)
    turns = _take_turns(engine, num_tokens // 2, batch=4)
    return plain, {name: _tok_s(each) for name, each in turns.items()}


def _take_turns(
    engine: Engine, num_tokens: int, *, batch: int = 1
) -> dict[bool, list[dict[str, float]]]:
    """The figures in lanes and without, by turns: both see the same machine."""
    turns: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(NUM_TURNS):
        for overlaps, found in turns.items():
            engine.set_lanes(overlaps)
            found.append(engine.decode(num_tokens // NUM_TURNS, batch=batch))
    return turns


def _tok_s(turns: list[dict[str, float]]) -> float:
    return median(each["tok_s"] for each in turns)


def measure_pairs(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, _one_local_duck(), MTP1)
    engine.decode(16)
    turns = _take_turns(engine, num_tokens)
    means = {key: mean(each[key] for each in turns[True]) for key in turns[True][0]}
    return {**means, "serial": _tok_s(turns[False]), "lanes": _tok_s(turns[True])}


def _gate(directory: Path, num_tokens: int) -> Iterator[Result]:
    """Where drafting cannot pay: drafts that fail, and a batch that fills the time."""
    for name, acceptance, batch in (
        ("acceptance 0.1", 0.1, 1),
        ("acceptance 0.85, batch 16", 0.85, 16),
    ):
        sizes = replace(WIDE, acceptance=acceptance)
        model_dir = write_random_model(sizes, directory / f"gate{batch}")

        def measured(
            speculation: dict[str, str] | None,
            gate: bool,
            model_dir: Path = model_dir,
            batch: int = batch,
        ) -> float:
            return in_fresh_process(
                measure_gate, model_dir, speculation, gate, num_tokens, batch
            )

        plain = measured(None, False)
        for shown, gate in (("always", False), ("with the gate", True)):
            yield Result(
                f"{name}, duck_mtp1 {shown}",
                "decode",
                measured(MTP1, gate),
                "tok/s",
                "plain",
                plain,
            )


def measure_gate(
    model_dir: Path,
    speculation: dict[str, str] | None,
    gate: bool,
    num_tokens: int,
    batch: int,
) -> float:
    duck = {**_one_local_duck(), "draft_gate": gate}
    engine = Engine(model_dir, duck, speculation)
    # The gate decides within the first steps.
    engine.decode(40 * batch, batch=batch)
    return engine.decode(4 * num_tokens * batch, batch=batch)["tok_s"]


def _depth(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    us = in_fresh_process(measure_layer_us, model_dir, num_tokens)
    for transport, target in (("native", "<= 100 us"), ("grpcio", "<= 250 us")):
        yield Result(
            f"58 MoE layers over {transport}, beyond in process",
            "us_per_layer",
            us[transport] - us["in process"],
            "us",
            "in process",
            us["in process"],
            target=target,
        )
    yield from _whole_engines("58 MoE layers,", model_dir, num_tokens)
    yield from _tail("58 MoE layers,", model_dir, num_tokens)


def measure_layer_us(model_dir: Path, num_tokens: int) -> dict[str, float]:
    """A token's time over the MoE layers; one engine, whose ducks take turns."""
    with contextlib.ExitStack() as stack:
        fleets = {"in process": fleet_in_process(model_dir)}
        for transport in ("native", "grpcio"):
            fleets[transport] = stack.enter_context(one_duck(model_dir, transport))
        endpoints = [duck.name for duck in fleets["native"].ducks]
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


if __name__ == "__main__":
    main("overlap", run, __doc__)
