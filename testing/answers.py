"""Engines on the same weights, with and without duck_mtp1, each in this process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from testing.engines import start_engine, will_be_closed
from training.tokenizer import prompt
from vllm_duck.spec_decode.lanes.policy import LanePolicy

MTP1 = {"method": "duck_mtp1"}
QUESTIONS = (
    "What is 62 + 44?",
    "Is 91 prime?",
    "What does heapq.heappop do?",
    "What does inspect.cleandoc do?",
    "What is sparse attention?",
)


@dataclass(frozen=True)
class Said:
    """All of an answer that a client can see."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list | None
    prompt_logprobs: list | None


def start(model_dir: Path, *, speculates: bool, num_drafts: int = 1, **options: Any):
    """An engine that ends with the fixture `engines`, which it needs.

    Which way is quicker depends on the machine. This one always drafts, and always runs
    in lanes where a step can be divided: `lanes_are` chooses for a while.
    """
    assert will_be_closed(), "whoever starts an engine asks for the fixture `engines`"
    if speculates:
        several = {"method": "duck_mtp", "num_speculative_tokens": num_drafts}
        options["speculative_config"] = dict(MTP1) if num_drafts == 1 else several
    options.setdefault("disable_log_stats", False)
    llm = start_engine(model_dir, duck={"draft_gate": False}, **options)
    runner_of(llm).lanes.policy = LanePolicy(True, times=None)
    return llm


@contextmanager
def lanes_are(overlaps: bool, llm) -> Iterator[None]:
    """Every step that can be divided runs in two lanes, or none does."""
    lanes = runner_of(llm).lanes
    before, lanes.policy = lanes.policy, LanePolicy(overlaps, times=None)
    try:
        yield
    finally:
        lanes.policy = before


@contextmanager
def recording_loads(names: list[str]) -> Iterator[None]:
    """Engines that start meanwhile put the tensors that their host loads into it."""
    from vllm_duck.models.loader import load_views

    def recorded(model_dir: Path, views: Mapping[str, Any]) -> None:
        names.extend(views)
        load_views(model_dir, views)

    with patch("vllm_duck.models.loader.load_views", recorded):
        yield


def make_prompts(model_dir: Path, *, thinking: bool = False) -> list[list[int]]:
    """Questions; then repeated tokens, and prompts longer than index_topk."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def turn(question):
        text = prompt(question, thinking=thinking)
        return tokenizer.encode(text, add_special_tokens=False).ids

    asked = [turn(question) for question in QUESTIONS]
    return [*asked, [50] * 90, (asked[2] * 40)[:200], asked[3] * 12]


def ask(llm, prompts, params=None, **sampling) -> list[Said]:
    """One Said per answer. Greedy and 24 tokens long unless asked otherwise."""
    from vllm import SamplingParams

    settings = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params or SamplingParams(**settings),
        use_tqdm=False,
    )
    return [
        Said(
            list(answer.token_ids),
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            _values(answer.logprobs),
            _values(output.prompt_logprobs),
        )
        for output in outputs
        for answer in output.outputs
    ]


def tokens_of(said: list[Said]) -> list[list[int]]:
    return [answer.token_ids for answer in said]


def worker_of(llm):
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def runner_of(llm):
    return worker_of(llm).model_runner


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


def draft_counts(llm) -> tuple[int, int]:
    """Draft tokens so far: verified, accepted."""
    found = {
        metric.name: metric.value for metric in llm.get_metrics() if _counts(metric)
    }
    return (
        int(found["vllm:spec_decode_num_draft_tokens"]),
        int(found["vllm:spec_decode_num_accepted_tokens"]),
    )


def _counts(metric) -> bool:
    return metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")


def _values(logprobs) -> list | None:
    if not logprobs:
        return None
    return [
        None if row is None else {t: (p.logprob, p.rank) for t, p in row.items()}
        for row in logprobs
    ]
