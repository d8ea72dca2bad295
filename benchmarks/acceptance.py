"""How often the target accepts what the MTP layer drafts, and why the design matters.

Two kinds of prompts: `reasoning` are small arithmetic problems answered step by step
(training.chains), `text` are questions about Python's library (training.corpus); both
are of the sets that the bundled model was trained on. Counted by vLLM's own metrics:
accepted drafts over verified ones.

The ablations change one thing each, at temperature 0: `stateless` shows the MTP layer
the newest row alone, `bf16 MTP cache` keeps its history unquantised, `unverified rows`
leaves in its history what a rejected draft would have put there. The peer is stock
vLLM's `mtp` on the same weights as a dense DeepSeek-V3; its text differs in places, so
`same answers` counts the answers, given one at a time, that both say alike.

`depth j` is how often the first j of five drafts are all accepted, at temperature 0.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main
from testing.answers import runner_of
from testing.engines import in_fresh_process, start_engine

TEMPERATURES = (0.0, 0.6, 1.0)
NUM_TOKENS, NUM_TOKENS_QUICK = 2400, 500
NUM_DRAFTS = 5
MAX_TOKENS = 300
BATCH_SIZE = 8
# Answers of each kind to compare with stock's one by one.
NUM_ANSWERS, NUM_ANSWERS_QUICK = 30, 8
# Acceptance that each kind should reach at temperature 0, per cent.
TARGETS = {"reasoning": 95.0, "text": 70.0}
# How much of it the history is worth, at least.
HISTORY_TARGETS = {"reasoning": 2.2, "text": 1.4}

Prompts = dict[str, list[list[int]]]


class Answer(NamedTuple):
    """A greedy answer, and what became of its drafts."""

    token_ids: tuple[int, ...]
    num_drafts: float
    num_accepted: float


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    prompts = make_prompts(model_dir)
    num_tokens = NUM_TOKENS_QUICK if quick else NUM_TOKENS

    def measured(temperatures: Sequence[float], ablation: str = "") -> dict:
        return in_fresh_process(
            measure, model_dir, prompts, temperatures, num_tokens, ablation
        )

    num_answers = NUM_ANSWERS_QUICK if quick else NUM_ANSWERS
    asked = [prompt for group in prompts.values() for prompt in group[:num_answers]]
    ours = measured(TEMPERATURES)
    our_answers = in_fresh_process(answer_each, model_dir, asked)
    stock, stock_answers = in_fresh_process(
        measure_stock, model_dir, prompts, num_tokens, asked
    )
    for kind, temperature in itertools.product(prompts, TEMPERATURES):
        is_greedy = temperature == 0
        yield Result(
            case=f"{kind} temperature {temperature:g}",
            metric="acceptance",
            value=ours[kind, temperature],
            unit="%",
            peer="vLLM mtp, dense V3" if is_greedy else "",
            peer_value=stock[kind, temperature] if is_greedy else None,
            target=f">= {TARGETS[kind]} %" if is_greedy else "",
        )
    yield _same_answers(our_answers, stock_answers)
    chances = in_fresh_process(measure_depths, model_dir, prompts, num_tokens)
    for kind, by_depth in chances.items():
        for depth, chance in enumerate(by_depth, 1):
            case = f"{kind} temperature 0 depth {depth}"
            yield Result(case, "acceptance", 100 * chance, "%")
    for ablation in ABLATIONS:
        changed = measured(TEMPERATURES[:1], ablation)
        for kind in prompts:
            target = HISTORY_TARGETS[kind] if ablation == "stateless" else None
            yield Result(
                case=f"{kind} temperature 0 {ablation}",
                metric="acceptance",
                value=changed[kind, 0.0],
                unit="%",
                peer="ours",
                peer_value=ours[kind, 0.0],
                target=f"ratio <= 1/{target}" if target else "",
            )


def _same_answers(ours: list["Answer"], stock: list["Answer"]) -> Result:
    pairs = zip(ours, stock, strict=True)
    same = [(o, s) for o, s in pairs if o.token_ids == s.token_ids]

    def accepted(answers: Iterable["Answer"]) -> float:
        found = list(answers)
        return (
            100 * sum(a.num_accepted for a in found) / sum(a.num_drafts for a in found)
        )

    return Result(
        case=f"same answers, {len(same)} of {len(ours)}, temperature 0",
        metric="acceptance",
        value=accepted(o for o, _ in same),
        unit="%",
        peer="vLLM mtp, dense V3",
        peer_value=accepted(s for _, s in same),
        target="ratio >= 1",
    )


def make_prompts(model_dir: Path) -> Prompts:
    """Chat prompts of each kind, in a fixed order."""
    from tokenizers import Tokenizer

    from training.chains import MAKERS, problems
    from training.corpus import Corpus
    from training.tokenizer import prompt

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    chains = [problems(kind, 16, is_held_out=False) for kind in MAKERS]
    asked = [
        problem.question for group in zip(*chains, strict=False) for problem in group
    ]
    entries = [entry.question for entry in Corpus().entries]
    return {
        "reasoning": [encode(prompt(question, thinking=True)) for question in asked],
        "text": [
            encode(prompt(question)) for question in entries[:: len(entries) // 64]
        ],
    }


def measure(
    model_dir: Path,
    prompts: Prompts,
    temperatures: Sequence[float],
    num_tokens: int,
    ablation: str = "",
) -> dict[tuple[str, float], float]:
    """Acceptance in per cent, by kind and temperature."""
    prepare, change = ABLATIONS.get(ablation, (_nothing, _nothing))
    prepare()
    llm = _start_ours(model_dir)
    change(runner_of(llm))
    return {
        (kind, temperature): _acceptance(llm, group, temperature, num_tokens)
        for kind, group in prompts.items()
        for temperature in temperatures
    }


def measure_depths(
    model_dir: Path, prompts: Prompts, num_tokens: int
) -> dict[str, list[float]]:
    """How often the first 1, 2, ... drafts are all accepted, by kind."""
    from vllm_duck.spec_decode.draft_meter import DraftSums

    llm = _start_ours(model_dir, num_drafts=NUM_DRAFTS)

    def sums() -> DraftSums:
        (figures,) = llm.collective_rpc("step_figures")
        return DraftSums.from_figures(figures["drafts"])

    chances = {}
    for kind, group in prompts.items():
        before = sums()
        _acceptance(llm, group, 0.0, num_tokens)
        chances[kind] = (sums() - before).chances
    return chances


def answer_each(model_dir: Path, asked: list[list[int]]) -> list[Answer]:
    """Our answers, one at a time."""
    return _answers(_start_ours(model_dir), asked)


def _start_ours(model_dir: Path, *, num_drafts: int = 1) -> Any:
    return start_engine(
        model_dir,
        duck={"draft_gate": False},
        speculative_config={
            "method": "duck_mtp",
            "num_speculative_tokens": num_drafts,
        },
        enable_prefix_caching=False,
        disable_log_stats=False,
    )


def _answers(llm: Any, asked: list[list[int]]) -> list[Answer]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    answers = []
    for prompt in asked:
        before = _counts(llm)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        counts = (b - a for a, b in zip(before, _counts(llm), strict=True))
        answers.append(Answer(tuple(output.outputs[0].token_ids), *counts))
    return answers


def measure_stock(
    model_dir: Path, prompts: Prompts, num_tokens: int, asked: list[list[int]]
) -> tuple[dict[tuple[str, float], float], list[Answer]]:
    """The same of stock vLLM, greedy, on the weights as a dense DeepSeek-V3.

    And its answers to what is asked, one at a time.
    """
    import torch

    from testing.oracle import write_dequantized

    with tempfile.TemporaryDirectory() as directory:
        write_dequantized(
            model_dir,
            Path(directory),
            torch.bfloat16,
            as_dense_v3=True,
            with_mtp=True,
        )
        llm = start_engine(
            Path(directory),
            duck=None,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1},
            disable_log_stats=False,
        )
        rates = {
            (kind, 0.0): _acceptance(llm, group, 0.0, num_tokens)
            for kind, group in prompts.items()
        }
        return rates, _answers(llm, asked)


def _acceptance(
    llm: Any, prompts: list[list[int]], temperature: float, num_tokens: int
) -> float:
    """Answer prompts, around again if need be, until that many tokens are generated."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
    before, generated = _counts(llm), 0
    asked = itertools.cycle(prompts)
    while generated < num_tokens:
        batch = [{"prompt_token_ids": p} for p in itertools.islice(asked, BATCH_SIZE)]
        for output in llm.generate(batch, params, use_tqdm=False):
            generated += len(output.outputs[0].token_ids)
    verified, accepted = (b - a for a, b in zip(before, _counts(llm), strict=True))
    return accepted / verified * 100


def _counts(llm: Any) -> tuple[float, float]:
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return (
        found["vllm:spec_decode_num_draft_tokens"],
        found["vllm:spec_decode_num_accepted_tokens"],
    )


def _nothing(runner: Any = None) -> None:
    pass


def _only_the_newest_row(runner: Any) -> None:
    """Run each MTP row as a sequence of its own, in the block that vLLM never uses."""
    from vllm_duck.models.batch import AttentionBatch, RequestRows
    from vllm_duck.models.cpu.layer import DoneLayer

    block_size = runner.cache_config.block_size
    layer = runner.drafter.model.layer
    stage0 = layer.stage0

    def stage0_alone(rows: Any, step: Any, wanted: Any) -> Any:
        own = AttentionBatch(
            requests=(RequestRows(num_rows=1, first_visible=1),),
            slots=np.zeros(1, np.int64),
            block_table=np.zeros((1, 1), np.int32),
            block_size=block_size,
        )
        outs = [stage0(rows[[i]], step.lane(np.array([i]), own)).wait() for i in wanted]
        return DoneLayer(np.concatenate([out.rows for out in outs]))

    layer.stage0 = stage0_alone


def _bf16_cache() -> None:
    """Build the MTP layer, and only it, with bf16 caches."""
    from vllm_duck.models import mtp
    from vllm_duck.models.kv_cache import LayerCaches

    class Bf16Caches(LayerCaches):
        @classmethod
        def of(cls, dims: Any, kv_dtype: Any, prefix: str) -> LayerCaches:
            return LayerCaches.of(dims, "bf16", prefix)

    mtp.LayerCaches = Bf16Caches  # type: ignore[misc]


def _keep_unverified_rows(runner: Any) -> None:
    """Where a draft was rejected, put the row that it would have made into the cache.

    The next draft itself comes from the right row, as ever: only history is spoiled.
    """
    propose = runner.propose_draft_token_ids

    def propose_and_spoil(
        scheduler_output: Any,
        sampled: list[list[int]],
        metadata: Any,
        hidden_states: Any,
        sample_hidden: Any,
        aux_hidden: Any,
        spec_metadata: Any,
        common: Any,
        slots: Any,
    ) -> Any:
        token_ids = propose(
            scheduler_output,
            sampled,
            metadata,
            hidden_states,
            sample_hidden,
            aux_hidden,
            spec_metadata,
            common,
            slots,
        )
        ends = common.query_start_loc_cpu[1:].tolist()
        drafted = iter(spec_metadata.draft_token_ids.tolist())
        for i, num_drafts in enumerate(spec_metadata.num_draft_tokens):
            drafts = list(itertools.islice(drafted, num_drafts))
            if drafts and len(sampled[i]) <= num_drafts:
                row = ends[i] - 1 - num_drafts
                _append(runner, common, i, row, drafts[0], hidden_states)
        return token_ids

    runner.propose_draft_token_ids = propose_and_spoil


def _append(
    runner: Any, common: Any, req_idx: int, row: int, token_id: int, hidden: Any
) -> None:
    import torch
    from vllm.forward_context import set_forward_context

    from vllm_duck.models.batch import AttentionBatch, RequestRows

    mtp = runner.drafter.model
    positions = runner.positions[row : row + 1]
    batch = AttentionBatch(
        requests=(RequestRows(num_rows=1, first_visible=int(positions) + 1),),
        slots=common.slot_mapping[row : row + 1].numpy(),
        block_table=common.block_table_tensor[req_idx : req_idx + 1].numpy(),
        block_size=runner.cache_config.block_size,
    )
    prefix = mtp.caches.latent.prefix
    with set_forward_context({prefix: batch}, runner.vllm_config, num_tokens=1):
        mtp(torch.tensor([token_id]), positions, hidden[row : row + 1])


# What is done before the engine starts, and to its runner then.
ABLATIONS: dict[str, tuple[Callable[[], None], Callable[[Any], None]]] = {
    "stateless": (_nothing, _only_the_newest_row),
    "bf16 MTP cache": (_bf16_cache, _nothing),
    "unverified rows": (_nothing, _keep_unverified_rows),
}


if __name__ == "__main__":
    main("acceptance", run, __doc__)
