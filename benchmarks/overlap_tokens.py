"""Tokens a second of whole engines: plain, serial, in lanes, gated; stock vLLM's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from benchmarks.common import Result
from benchmarks.engines import in_fresh_process
from benchmarks.overlap_engine import MTP1, NUM_TURNS, Engine, one_duck_settings
from benchmarks.random_model import WIDE, write_random_model


def whole_engines(name: str, model_dir: Path, num_tokens: int) -> Iterator[Result]:
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


def measure_plain(model_dir: Path, num_tokens: int) -> tuple[float, dict[bool, float]]:
    engine = Engine(model_dir, one_duck_settings(), None)
    engine.decode(16)
    plain = engine.decode(num_tokens)["tok_s"]
    engine.decode(8, batch=4)
    turns = _take_turns(engine, num_tokens // 2, batch=4)
    return plain, {name: _tok_s(each) for name, each in turns.items()}


def measure_pairs(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, one_duck_settings(), MTP1)
    engine.decode(16)
    turns = _take_turns(engine, num_tokens)
    means = {key: mean(each[key] for each in turns[True]) for key in turns[True][0]}
    return {**means, "serial": _tok_s(turns[False]), "lanes": _tok_s(turns[True])}


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


def beside_stock(model_dir: Path, dense_dir: Path, num_tokens: int) -> Iterator[Result]:
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


def measure_choice(model_dir: Path, num_tokens: int) -> float:
    engine = Engine(model_dir, one_duck_settings(), MTP1)
    engine.choose_lanes()
    engine.decode(100)
    return engine.decode(num_tokens)["tok_s"]


def gated(directory: Path, num_tokens: int) -> Iterator[Result]:
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
    duck = {**one_duck_settings(), "draft_gate": gate}
    engine = Engine(model_dir, duck, speculation)
    # The gate decides within the first steps.
    engine.decode(40 * batch, batch=batch)
    return engine.decode(4 * num_tokens * batch, batch=batch)["tok_s"]
