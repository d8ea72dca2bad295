"""An engine of the overlap benchmark, and the figures of what it is asked to do."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance import make_prompts
from benchmarks.common import MODEL_DIR
from testing.answers import runner_of
from testing.ducks.in_process import InProcessDuck
from testing.engines import start_engine
from vllm_duck.config import TransportName
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import FanOut, Shard
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.grpcio.fan_out import PythonFanOut
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.spec_decode.lanes.times import Overlap, OverlapMeter

MTP1 = {"method": "duck_mtp1"}
PREFILL_TOKENS = 2048
# Of what shares an engine, in turns.
NUM_TURNS = 4
MAX_ANSWER = 200


def ducks_in_process(model_dir: Path) -> FanOut:
    """The ducks' kernel in this process, on one thread."""
    checkpoint = Checkpoint(model_dir)
    model = checkpoint.summary
    whole = Shard(0, model.moe_intermediate_size, 0, model.n_routed_experts)
    loaded = load_shard(checkpoint, whole, show_progress=False)
    kernel = ShardMoe(loaded, MoeKernel(num_threads=1, pin=False))
    return PythonFanOut([InProcessDuck(kernel, kernel.info)])


def one_duck_settings() -> dict[str, Any]:
    """One thread for the duck; the host has all that vLLM gives it."""
    return {"local_ducks": 1, "local_threads": 1}


@contextmanager
def one_duck(model_dir: Path, transport: TransportName) -> Iterator[Fleet]:
    """A local duck of one thread, and the way to it."""
    flags = [f"--transport={transport}"]
    with (
        LocalDucks.start(
            model_dir, num_ducks=1, num_threads=1, serve_flags=flags
        ) as ducks,
        Fleet.connect(ducks.endpoints, transport=transport) as fleet,
    ):
        yield fleet


class Engine:
    """An engine in this process and what one benchmark asks of it."""

    def __init__(
        self,
        model_dir: Path,
        duck: dict[str, Any] | None,
        speculation: dict[str, Any] | None,
    ) -> None:
        options = {"speculative_config": dict(speculation)} if speculation else {}
        if duck is not None:
            duck = {"draft_gate": False, **duck}
        self.llm = start_engine(
            model_dir,
            duck=duck,
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_num_batched_tokens=PREFILL_TOKENS,
            max_model_len=PREFILL_TOKENS + 8,
            **options,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = runner_of(self.llm)
        config = core.vllm_config.model_config.hf_config
        self.num_sparse_layers = config.num_hidden_layers - config.first_k_dense_replace
        # Goes on from call to call: each measures other texts.
        self.asked = itertools.cycle(make_prompts(MODEL_DIR)["reasoning"])
        self.meter = OverlapMeter()
        if duck is not None:
            self.meter = self.runner.lanes.meter
            self.default_policy = self.runner.lanes.policy
            self.set_lanes(True)

    def set_lanes(self, overlaps: bool) -> None:
        """Always in lanes, or never."""
        from vllm_duck.spec_decode.lanes.policy import LanePolicy

        self.runner.lanes.policy = LanePolicy(overlaps, times=None)

    def choose_lanes(self) -> None:
        """In lanes where that measures quicker: what users get."""
        self.runner.lanes.policy = self.default_policy

    def decode(self, num_tokens: int, *, batch: int = 1) -> dict[str, float]:
        """Tokens a second behind the prompts, and the lanes' figures of those steps.

        Answers questions, around again if need be, until that many tokens are there.
        """
        before = self.meter.total, self._draft_counts()
        seconds, generated = 0.0, 0
        prompts = Overlap()
        while generated < num_tokens:
            length = min(MAX_ANSWER, 1 + (num_tokens - generated) // batch)
            self._add(list(itertools.islice(self.asked, batch)), max(2, length))
            at_prompt = self.meter.total
            self.llm.llm_engine.step()
            prompts += self.meter.total - at_prompt
            begin_s = time.perf_counter()
            generated += self._finish() - batch
            seconds += time.perf_counter() - begin_s
        steps = self.meter.total - before[0] - prompts
        verified, accepted = (
            b - a for a, b in zip(before[1], self._draft_counts(), strict=True)
        )
        return {
            "tok_s": generated / seconds,
            "efficiency": steps.efficiency,
            "ratio": steps.ratio,
            "acceptance": accepted / verified if verified else 0.0,
            **self._stages(steps),
        }

    def tail(self, num_tokens: int) -> dict[str, float]:
        """What a step could gain if lane 0's token were sampled before lane 1 is back.

        A rejected draft makes lane 1 void, so nobody need wait for it (`window_s`, from
        the end of lane 0 to that of lane 1). Behind an accepted one the MTP layer takes
        two rows, of which the first could have gone ahead (`row_s`, what it adds).
        """
        drafter, propose = self.runner.drafter, self.runner.drafter.draft
        seconds: dict[int, list[float]] = {1: [], 2: []}

        def timed(rows: Any, *args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            drafted = propose(rows, *args, **kwargs)
            seconds.setdefault(len(rows.next_ids), []).append(
                time.perf_counter() - begin_s
            )
            return drafted

        drafter.draft = timed
        self.meter.num_wanted = num_tokens
        found = self.decode(num_tokens)
        del drafter.draft
        records, self.meter.records = self.meter.records, []
        self.meter.num_wanted = 0
        windows = [
            second.stages[-1].wait_end_ns - first.stages[-1].wait_end_ns
            for first, second in (r.lanes for r in records if r.serial_reason is None)
        ]
        one_row_s, two_rows_s = (float(np.median(seconds[n])) for n in (1, 2))
        return {
            "step_s": (1 + found["acceptance"]) / found["tok_s"],
            "window_s": float(np.median(windows)) / 1e9,
            "row_s": max(0.0, two_rows_s - one_row_s),
            "acceptance": found["acceptance"],
        }

    def prefill(self, num_prompt_tokens: int) -> dict[str, float]:
        """The quickest of three."""
        prompt = [20 + i % 1500 for i in range(num_prompt_tokens)]
        found = []
        for _ in range(3):
            before, begin_s = self.meter.total, time.perf_counter()
            self._add([prompt], 1)
            self._finish()
            seconds = time.perf_counter() - begin_s
            stages = self._stages(self.meter.total - before)
            found.append({"seconds": seconds, **stages})
        return min(found, key=lambda each: each["seconds"])

    def _add(self, prompts: list[list[int]], num_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        for number, prompt in enumerate(prompts):
            self.llm.llm_engine.add_request(
                str(number), {"prompt_token_ids": prompt}, sampling
            )

    def _finish(self) -> int:
        """Run what was added to its end; returns the tokens generated."""
        engine, num_tokens = self.llm.llm_engine, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    num_tokens += len(output.outputs[0].token_ids)
        return num_tokens

    def _stages(self, steps: Overlap) -> dict[str, float]:
        """Mean seconds of a stage of each side."""
        num_stages = max(1, 2 * steps.num_steps * self.num_sparse_layers)
        return {
            "stage0_s": steps.s0_s / num_stages,
            "stage1_s": steps.s1_s / num_stages,
        }

    def _draft_counts(self) -> tuple[float, float]:
        found = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        return (
            found.get("vllm:spec_decode_num_draft_tokens", 0),
            found.get("vllm:spec_decode_num_accepted_tokens", 0),
        )
