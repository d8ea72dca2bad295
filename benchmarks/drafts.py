"""How many drafts pay, and whether the default finds that number.

`paced` ducks sleep as long as distinct experts would take: for m rows
32 (1 - (31/32)^m) times as long as for one, which is what rows that choose 8 of 256
experts by themselves need. The model has 58 MoE layers and random weights; its drafts
are made to be accepted as often as GLM-5.2's were published to be (0.84 0.66 0.49 0.34
0.28 for the first 1 to 5 drafts). One request; host : duck is the time of a layer's
stages for one row.

`k` are fixed numbers of drafts of one engine, `default` is its own choice once it has
decoded for a while; they and an engine without drafts take turns. `formula` is what
testing/step_model.py makes of the measured host and duck times. `mtp_share` is the MTP
layer's part of a step per draft. `bundled` is the bundled model with one local duck.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import MODEL_DIR, Result, main
from benchmarks.overlap.engine import MTP1, Engine, one_duck_settings
from benchmarks.overlap.paced_duck import Pace, leave_a_cpu, paced_duck
from benchmarks.overlap.random_model import DEEP, write_random_model
from testing.engines import Held, held_in_process
from testing.step_model import PUBLISHED_CHANCES, StepModel

MAX_DRAFTS = 5
CHANCES = PUBLISHED_CHANCES[:MAX_DRAFTS]
SPECULATION = {"method": "duck_mtp", "num_speculative_tokens": MAX_DRAFTS}
# Of the ducks' time for one row to the host's.
RATIOS, RATIOS_QUICK = (2.0, 1.0, 0.5, 0.1), (1.0, 0.5)
NUM_TOKENS, NUM_TOKENS_QUICK = 160, 40
NUM_TURNS, NUM_TURNS_QUICK = 3, 2
# Steps that the default has to learn in, at three tokens a step or fewer.
NUM_LEARNING, NUM_LEARNING_QUICK = 800, 250


class Drafting(Engine):
    """An engine whose drafts are accepted as often as asked, as many as told."""

    def __init__(
        self, model_dir: Path, duck: dict[str, Any], *, chances: Sequence[float] = ()
    ) -> None:
        leave_a_cpu()
        super().__init__(model_dir, {**duck, "draft_gate": True}, SPECULATION)
        self.choose_lanes()
        self._default = self.runner.gate
        if chances:
            self._throw_dice([b / a for a, b in pairwise((1.0, *chances))])

    def fix_drafts(self, num_drafts: int) -> None:
        self.runner.gate = FixedGate(num_drafts)

    def choose_drafts(self) -> None:
        self.runner.gate = self._default

    def learn_anew(self) -> None:
        from vllm_duck.spec_decode.gate import DraftGate
        from vllm_duck.spec_decode.lanes.policy import LanePolicy

        self._default = self.runner.gate = DraftGate(MAX_DRAFTS)
        self.runner.lanes.policy = LanePolicy(True)

    def drafts(self) -> dict[str, Any]:
        """The sums of `DraftMeter`."""
        figures: dict[str, Any] = self.runner.draft_meter.total.figures()
        return figures

    def _throw_dice(self, rates: Sequence[float]) -> None:
        """Let a draft at each depth be right, behind right ones, so often."""
        drafter, rng, depths = self.runner.drafter, random.Random(0), [0]
        draft, sample = drafter.draft, drafter._sample

        def draft_anew(*args: Any, **kwargs: Any) -> Any:
            depths[0] = 0
            return draft(*args, **kwargs)

        def sample_or_err(*args: Any) -> Any:
            row = sample(*args)
            is_wrong = rng.random() >= rates[depths[0]]
            depths[0] += 1
            return replace(row, token_ids=row.token_ids ^ 1) if is_wrong else row

        drafter.draft, drafter._sample = draft_anew, sample_or_err


class FixedGate:
    """So many drafts, whatever they bring; it measures nothing."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def choose(self, req_ids: Sequence[str]) -> list[int]:
        return [self._num_drafts] * len(req_ids)

    def observe_step(self, *args: Any) -> None: ...

    def observe_drafting(self, *args: Any) -> None: ...

    def observe_verified(self, *args: Any) -> None: ...

    def forget(self, req_id: str) -> None: ...


class Plain(Engine):
    def __init__(self, model_dir: Path, duck: dict[str, Any]) -> None:
        leave_a_cpu()
        super().__init__(model_dir, duck, None)


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as directory:
        sizes = replace(DEEP, acceptance=1.0)
        deep = write_random_model(sizes, Path(directory) / "deep")
        yield from paced(deep, quick)
    yield from bundled(model_dir, quick)


def paced(model_dir: Path, quick: bool) -> Iterator[Result]:
    with paced_duck(model_dir) as (endpoint, pace_file):
        pace, duck = Pace(pace_file), {"endpoints": [endpoint]}
        with (
            held_in_process(Plain, model_dir, duck) as plain,
            held_in_process(_dice_engine, model_dir, duck) as drafting,
        ):
            host_s = _host_s(drafting)
            for ratio in RATIOS_QUICK if quick else RATIOS:
                pace.call_s = -ratio * host_s
                model = StepModel(ratio, link_s=0.0, head_s=0.0, num_layers=58)
                yield from _at_one_pace(f"1:{ratio:g}", model, plain, drafting, quick)


def _host_s(drafting: Held) -> float:
    """Of a layer with one row, beside a duck that takes no time."""
    drafting.ask("fix_drafts", 1)
    drafting.ask("set_lanes", True)
    drafting.ask("decode", 8)
    found: float = drafting.ask("decode", 16)["stage0_s"]
    return found


def _dice_engine(model_dir: Path, duck: dict[str, Any]) -> Drafting:
    return Drafting(model_dir, duck, chances=CHANCES)


def _at_one_pace(
    name: str, model: StepModel, plain: Held, drafting: Held, quick: bool
) -> Iterator[Result]:
    """model: of a layer's host time, but for the heads, which are small here."""
    drafting.ask("learn_anew")
    drafting.ask("decode", NUM_LEARNING_QUICK if quick else NUM_LEARNING)
    sides = {"plain": plain, **{str(k): drafting for k in range(1, MAX_DRAFTS + 1)}}
    found = _by_turns({**sides, "default": drafting}, quick)
    tok_s = {side: each["tok_s"] for side, each in found.items()}
    base = model.tokens_a_second(0, 1, CHANCES)
    for k in range(1, MAX_DRAFTS + 1):
        yield Result(
            f"paced {name} k={k}",
            "decode",
            tok_s[str(k)],
            "tok/s",
            "plain",
            tok_s["plain"],
            f"formula {model.tokens_a_second(k, 1, CHANCES) / base:.2f}",
        )
    case = f"paced {name} default"
    best = max(rate for side, rate in tok_s.items() if side != "default")
    default = tok_s["default"]
    yield Result(case, "decode", default, "tok/s", "plain", tok_s["plain"])
    yield Result(case, "of_best", default / best, "", target=">= 0.97")
    target = ">= 1.25" if name in ("1:0.5", "1:0.1") else ""
    yield Result(case, "over_one_draft", default / tok_s["1"], "", target=target)
    yield from _mtp_share(f"paced {name}", drafting)


def _by_turns(sides: dict[str, Held], quick: bool) -> dict[str, dict[str, float]]:
    """Medians of each side's figures; all see the same machine."""
    num_tokens = NUM_TOKENS_QUICK if quick else NUM_TOKENS
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(NUM_TURNS_QUICK if quick else NUM_TURNS):
        for side, engine in sides.items():
            if side == "default":
                engine.ask("choose_drafts")
            elif side.isdigit():
                engine.ask("fix_drafts", int(side))
            found[side].append(engine.ask("decode", num_tokens))
    return {
        side: {key: median(each[key] for each in turns) for key in turns[0]}
        for side, turns in found.items()
    }


def _mtp_share(name: str, drafting: Held) -> Iterator[Result]:
    """Of the time of a step with all drafts, what a deeper one takes."""
    drafting.ask("fix_drafts", MAX_DRAFTS)
    before = drafting.ask("drafts")
    drafting.ask("decode", NUM_TOKENS_QUICK)
    after = drafting.ask("drafts")
    mtp_s = [b - a for a, b in zip(before["mtp_s"], after["mtp_s"], strict=True)]
    step_s = after["step_s"] - before["step_s"] + sum(mtp_s)
    share = sum(mtp_s[1:]) / (MAX_DRAFTS - 1) / step_s
    yield Result(f"{name} k={MAX_DRAFTS}, of a step", "mtp_share", share, "")


def bundled(model_dir: Path, quick: bool) -> Iterator[Result]:
    duck = one_duck_settings()
    with (
        held_in_process(_gated_engine, model_dir, duck, MTP1) as one,
        held_in_process(Drafting, model_dir, duck) as several,
    ):
        for engine in (one, several):
            engine.ask("decode", NUM_LEARNING_QUICK if quick else NUM_LEARNING)
        found = _by_turns({"duck_mtp1": one, "default": several}, quick)
    tok_s = {side: each["tok_s"] for side, each in found.items()}
    yield Result(
        "bundled default",
        "decode",
        tok_s["default"],
        "tok/s",
        "duck_mtp1",
        tok_s["duck_mtp1"],
        "ratio >= 0.98",
    )


def _gated_engine(
    model_dir: Path, duck: dict[str, Any], speculation: dict[str, Any]
) -> Engine:
    leave_a_cpu()
    engine = Engine(model_dir, {**duck, "draft_gate": True}, speculation)
    engine.choose_lanes()
    return engine


if __name__ == "__main__":
    main("drafts", run, __doc__)
