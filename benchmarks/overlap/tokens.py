"""Tokens a second of whole engines: plain, serial, in lanes, gated; stock vLLM's."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Result
from benchmarks.overlap.engine import MTP1, NUM_TURNS, Engine, one_duck_settings
from benchmarks.overlap.random_model import WIDE, write_random_model
from testing.engines import Held, held_in_process, in_fresh_process

# What an engine is told before its turn, if anything.
_MODES: dict[str, tuple[Any, ...]] = {
    "serial": ("set_lanes", False),
    "lanes": ("set_lanes", True),
    "chosen": ("choose_lanes",),
}


def by_turns(
    engines: dict[str, Held], num_tokens: int, *, batch: int = 1
) -> dict[str, dict[str, float]]:
    """Medians of the figures of each mode; all modes see the same machine."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in engines}
    for turn in range(NUM_TURNS + 1):
        for mode, engine in engines.items():
            if mode in _MODES:
                engine.ask(*_MODES[mode])
            figures = engine.ask("decode", num_tokens // NUM_TURNS, batch=batch)
            # The first one warms up.
            if turn:
                found[mode].append(figures)
    return {
        mode: {key: median(each[key] for each in turns) for key in turns[0]}
        for mode, turns in found.items()
    }


def whole_engines(name: str, model_dir: Path, num_tokens: int) -> Iterator[Result]:
    make = (Engine, model_dir, one_duck_settings())
    with held_in_process(*make, None) as plain, held_in_process(*make, MTP1) as pairs:
        found = by_turns(
            {"plain": plain, "serial": pairs, "lanes": pairs, "chosen": pairs},
            num_tokens,
        )
        batch = by_turns({"serial": plain, "lanes": plain}, num_tokens // 2, batch=4)
    tok_s = {mode: each["tok_s"] for mode, each in found.items()}
    yield decoding(
        f"{name} batch 4, lanes",
        batch["lanes"]["tok_s"],
        "serial",
        batch["serial"]["tok_s"],
    )
    for case, mode, target in (
        ("serial", "serial", ""),
        ("with lanes", "lanes", f"formula {formula(found['lanes']):.2f}"),
        ("as by default", "chosen", ""),
    ):
        yield decoding(
            f"{name} duck_mtp1 {case}", tok_s[mode], "plain", tok_s["plain"], target
        )


def decoding(
    case: str, ours: float, peer: str, theirs: float, target: str = ""
) -> Result:
    return Result(case, "decode", ours, "tok/s", peer, theirs, target=target)


def formula(figures: dict[str, float]) -> float:
    """What lanes of draft and confirmed token make of plain decoding, at best."""
    c_s, d_s, alpha = (figures[k] for k in ("stage0_s", "stage1_s", "acceptance"))
    return (1 + alpha) * (c_s + d_s) / (2 * max(c_s, d_s))


def beside_stock(model_dir: Path, dense_dir: Path, num_tokens: int) -> Iterator[Result]:
    """The same weights as dense deepseek_v3: stock vLLM has the experts in process."""
    in_fresh_process(write_dense, model_dir, dense_dir)
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    with (
        held_in_process(Engine, dense_dir, None, speculation) as stock,
        held_in_process(Engine, model_dir, one_duck_settings(), MTP1) as ours,
    ):
        found = by_turns({"plain": stock, "lanes": ours, "chosen": ours}, num_tokens)
    for case, mode, target in (
        ("always in lanes", "lanes", ""),
        ("in lanes where they pay, as by default", "chosen", "ratio >= 1"),
    ):
        yield decoding(
            f"bundled duck_mtp1, {case}",
            found[mode]["tok_s"],
            "vLLM mtp, dense V3",
            found["plain"]["tok_s"],
            target,
        )


def write_dense(model_dir: Path, dense_dir: Path) -> None:
    import torch

    from testing.oracle import write_dequantized

    write_dequantized(
        model_dir, dense_dir, torch.bfloat16, as_dense_v3=True, with_mtp=True
    )


def gated(directory: Path, num_tokens: int) -> Iterator[Result]:
    """Where drafting cannot pay: drafts that fail, and a batch that fills the time."""
    for name, acceptance, batch in (
        ("acceptance 0.1", 0.1, 1),
        ("acceptance 0.85, batch 16", 0.85, 16),
    ):
        sizes = replace(WIDE, acceptance=acceptance)
        model_dir = write_random_model(sizes, directory / f"gate{batch}")

        def engine(
            speculation: dict[str, str] | None,
            gate: bool,
            model_dir: Path = model_dir,
        ) -> AbstractContextManager[Held]:
            duck = {**one_duck_settings(), "draft_gate": gate}
            return held_in_process(Engine, model_dir, duck, speculation)

        with (
            engine(None, False) as plain,
            engine(MTP1, False) as always,
            engine(MTP1, True) as with_gate,
        ):
            engines = {"plain": plain, "always": always, "with the gate": with_gate}
            found = by_turns(engines, 4 * num_tokens * batch, batch=batch)
        for shown in ("always", "with the gate"):
            yield decoding(
                f"{name}, duck_mtp1 {shown}",
                found[shown]["tok_s"],
                "plain",
                found["plain"]["tok_s"],
            )
