"""What two lanes bring, in one run each way.

`paced` ducks sleep, so that the ratio of the host's time c to the ducks' time d can be
swept on two cores; `real` ducks compute in processes of their own; `link` puts a paced
duck behind 2.5 Gb/s and 100 us in a network namespace (needs root; left out elsewhere).
Saved share and efficiency are the log line's: of the serial time, and of what a perfect
overlap would save. Tokens a second compare whole engines; the formula is
(1 + acceptance) (c + d) / (2 max(c, d)). The models have random weights and a chosen
acceptance (random_model.py), but for the bundled one.
"""

import contextlib
import itertools
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.acceptance import make_prompts
from benchmarks.common import MODEL_DIR, Result, main
from benchmarks.engines import in_fresh_process, start_engine
from benchmarks.paced_duck import Pace, paced_duck
from benchmarks.random_model import DEEP, WIDE, write_random_model
from vllm_duck.models.overlap import Overlap, OverlapMeter

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
PREFILL_TOKENS = 2048
MAX_ANSWER = 200
MTP1 = {"method": "duck_mtp1"}


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    num_tokens = 48 if quick else 192
    with tempfile.TemporaryDirectory() as directory:
        wide = write_random_model(WIDE, Path(directory) / "wide")
        yield from _paced(wide, num_tokens)
        yield from _link(wide, num_tokens)
        yield from _real(wide, num_tokens)
        yield from _whole_engines("wide", wide, num_tokens)
        yield from _whole_engines("bundled", model_dir, 4 * num_tokens)
        yield from _beside_stock(model_dir, Path(directory) / "v3", 4 * num_tokens)
        yield from _gate(Path(directory), num_tokens)
        deep = write_random_model(DEEP, Path(directory) / "deep")
        yield from _depth(deep, num_tokens)


def _paced(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    with paced_duck(model_dir) as (endpoint, pace_file):
        found = in_fresh_process(sweep, model_dir, endpoint, pace_file, num_tokens)
    yield from _sweep_results("paced", found)


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
    model_dir: Path, endpoint: str, pace_file: Path, num_tokens: int
) -> dict[str, dict[str, float]]:
    """Decode pairs and a prefill at every ratio of c to d."""
    engine = Engine(model_dir, {"endpoints": [endpoint]}, MTP1)
    pace = Pace(pace_file)
    found = {}
    engine.decode(16)
    c_s = engine.decode(num_tokens)["stage0_s"]
    for ratio in RATIOS:
        pace.call_s = ratio * c_s
        shown = f"1:{ratio:g}" if ratio >= 1 else f"{1 / ratio:g}:1"
        found[f"decode c:d = {shown}, c = {c_s * 1e3:.2f} ms"] = engine.decode(
            num_tokens
        )
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
    return found


def _link(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    with contextlib.ExitStack() as stack:
        try:
            address, prefix = stack.enter_context(_namespace())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"link: left out, no network namespace here ({error})")
            return
        endpoint, pace_file = stack.enter_context(
            paced_duck(model_dir, listen=f"{address}:7100", prefix=prefix)
        )
        found = in_fresh_process(sweep, model_dir, endpoint, pace_file, num_tokens)
        yield from _sweep_results("link", found)


@contextlib.contextmanager
def _namespace() -> Iterator[tuple[str, list[str]]]:
    """A host behind 2.5 Gb/s and 100 us; its address, and how to run there."""
    name, here, there = "duck-bench", "duck-here", "duck-there"
    commands = (
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip addr add 10.207.0.1/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} addr add 10.207.0.2/30 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
        f"tc qdisc add dev {here} root netem delay 50us rate 2500mbit",
        f"ip netns exec {name} tc qdisc add dev {there} root netem delay 50us "
        "rate 2500mbit",
    )
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield "10.207.0.2", ["ip", "netns", "exec", name]
    finally:
        for command in (f"ip link del {here}", f"ip netns del {name}"):
            with contextlib.suppress(OSError):
                subprocess.run(command.split(), capture_output=True)


def _one_local_duck() -> dict[str, Any]:
    """One core for the host, one for the duck."""
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


def _beside_stock(
    model_dir: Path, dense_dir: Path, num_tokens: int
) -> Iterator[Result]:
    """The same weights as dense deepseek_v3: stock vLLM has the experts in process."""
    in_fresh_process(write_dense, model_dir, dense_dir)
    stock = in_fresh_process(measure_stock, dense_dir, num_tokens)
    ours = in_fresh_process(measure_pairs, model_dir, num_tokens)
    yield Result(
        "bundled duck_mtp1 with lanes",
        "decode",
        ours["lanes"],
        "tok/s",
        "vLLM mtp, dense V3",
        stock,
        target="ratio >= 1",
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
    batch = {}
    for overlaps in (False, True):
        engine.set_lanes(overlaps)
        engine.decode(8, batch=4)
        batch[overlaps] = engine.decode(num_tokens // 2, batch=4)["tok_s"]
    return plain, batch


def measure_pairs(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, _one_local_duck(), MTP1)
    engine.decode(16)
    engine.set_lanes(False)
    serial = engine.decode(num_tokens)["tok_s"]
    engine.set_lanes(True)
    lanes = engine.decode(num_tokens)
    return {**lanes, "serial": serial, "lanes": lanes["tok_s"]}


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
    inside = in_fresh_process(measure_layer_us, model_dir, num_tokens, "")
    target = {"native": "<= 100 us", "grpcio": "<= 250 us"}
    for transport in target:
        remote = in_fresh_process(measure_layer_us, model_dir, num_tokens, transport)
        yield Result(
            f"58 MoE layers over {transport}, beyond in process",
            "us_per_layer",
            remote - inside,
            "us",
            "in process",
            inside,
            target=target[transport],
        )
    yield from _whole_engines("58 MoE layers,", model_dir, num_tokens)


def measure_layer_us(model_dir: Path, num_tokens: int, transport: str) -> float:
    """A token's time over the MoE layers; without a transport, of one process."""
    duck = {**_one_local_duck(), "transport": transport or "auto"}
    engine = Engine(model_dir, duck, None)
    if not transport:
        engine.compute_inside(model_dir)
    engine.decode(8)
    return 1e6 / engine.decode(num_tokens)["tok_s"] / engine.num_sparse_layers


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
        self.runner = core.model_executor.driver_worker.worker.model_runner
        config = core.vllm_config.model_config.hf_config
        self.num_sparse_layers = config.num_hidden_layers - config.first_k_dense_replace
        self.questions = make_prompts(MODEL_DIR)["reasoning"]
        self.meter = OverlapMeter()
        if duck is not None:
            self.meter = self.runner.meter
            self.set_lanes(True)

    def set_lanes(self, overlaps: bool) -> None:
        """Always in lanes, or never."""
        from vllm_duck.models.lanes import LanePolicy

        self.runner.model.model.lane_policy = LanePolicy(overlaps, times=None)

    def compute_inside(self, model_dir: Path) -> None:
        """Put the ducks' kernel into this process."""
        from vllm_duck.executor.checkpoint import Checkpoint
        from vllm_duck.executor.duck import Shard
        from vllm_duck.executor.fleet import Fleet
        from vllm_duck.executor.in_process import InProcessDuck
        from vllm_duck.executor.kernel import MoeKernel
        from vllm_duck.executor.loader import load_shard
        from vllm_duck.executor.shard_moe import ShardMoe

        checkpoint = Checkpoint(model_dir)
        model = checkpoint.summary
        whole = Shard(0, model.moe_intermediate_size, 0, model.n_routed_experts)
        loaded = load_shard(checkpoint, whole, show_progress=False)
        kernel = ShardMoe(loaded, MoeKernel(num_threads=1, pin=False))
        self.runner.attach_ducks(Fleet([InProcessDuck(kernel, kernel.info)]))

    def decode(self, num_tokens: int, *, batch: int = 1) -> dict[str, float]:
        """Tokens a second behind the prompts, and the lanes' figures of those steps.

        Answers questions, around again if need be, until that many tokens are there.
        """
        asked = itertools.cycle(self.questions)
        before = self.meter.total, self._draft_counts()
        seconds, generated = 0.0, 0
        prompts = Overlap()
        while generated < num_tokens:
            length = min(MAX_ANSWER, 1 + (num_tokens - generated) // batch)
            self._add(list(itertools.islice(asked, batch)), max(2, length))
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


if __name__ == "__main__":
    main("overlap", run, __doc__)
