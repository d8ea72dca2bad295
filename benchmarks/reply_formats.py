"""What rounding the ducks' replies does to logprobs, by the format of the reply.

One duck answers in fp32, and its sum is rounded as a reply of about bf16's bytes would
be: bf16; fp16 with a scale for each row; int16 with a shared exponent for each 128. All
go on greedily from chains, texts and nonsense (one token again and again), and are
compared with fp32 replies up to the first other token. `beyond index_topk` are tokens
behind more positions than the indexer chooses; `all attended` is the same with an
index_topk that leaves nothing out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import MODEL_DIR, Result, main
from testing.answers import make_prompts, runner_of, start
from testing.engines import Held, closing_engines, held_in_process
from vllm_duck.executor.duck import Ducks, InFlight, MoeRequest, MoeSum
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks

Floats = npt.NDArray[np.float32]
NUM_TOKENS = 40
NONSENSE = ([50] * 40, [51] * 40, [60] * 30, [7] * 35)


def _bf16(x: Floats) -> Floats:
    rounded: Floats = torch.from_numpy(x).bfloat16().float().numpy()
    return rounded


def _scaled_fp16(x: Floats) -> Floats:
    scale = _power_of_two(x) / np.float32(2**15)
    return (x / scale).astype(np.float16).astype(np.float32) * scale


def _shared_exponent(x: Floats) -> Floats:
    blocks = x.reshape(len(x), -1, 128)
    scale = _power_of_two(blocks) / np.float32(32767)
    return (np.rint(blocks / scale) * scale).astype(np.float32).reshape(x.shape)


def _power_of_two(x: Floats) -> Floats:
    """Not below the largest of the last axis."""
    largest = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30)
    return np.exp2(np.ceil(np.log2(largest))).astype(np.float32)


FORMATS: dict[str, Callable[[Floats], Floats]] = {
    "bf16": _bf16,
    "fp16 and a scale": _scaled_fp16,
    "int16, exponent of 128": _shared_exponent,
}


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    for name, topk in (("", None), (", all attended", 2048)):
        with held_in_process(Rounding, model_dir, topk) as engine:
            yield from _compare(engine, name, quick)


def _compare(engine: Held, name: str, quick: bool) -> Iterator[Result]:
    exact, _ = engine.ask("answers", None, quick)
    index_topk = engine.ask("index_topk")
    for form in FORMATS:
        got, error = engine.ask("answers", form, quick)
        yield Result(f"{form}{name}", "error of a sum", error, "relative, rms")
        for part, choose in (
            (f"up to {index_topk} positions", lambda at: at < index_topk),
            ("beyond", lambda at: at >= index_topk),
        ):
            differences = [
                abs(a - b)
                for one, other in zip(got, exact, strict=True)
                for at, a, b in one.beside(other)
                if choose(at)
            ]
            largest = max(differences, default=0.0)
            yield Result(f"{form}{name}, {part}", "largest change", largest, "logprob")


@dataclass(frozen=True)
class Answer:
    num_prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float]

    def beside(self, other: "Answer") -> Iterator[tuple[int, float, float]]:
        """Position and both logprobs, up to the first other token."""
        for i, (mine, its) in enumerate(
            zip(self.token_ids, other.token_ids, strict=True)
        ):
            if mine != its:
                return
            yield self.num_prompt_tokens + i, self.logprobs[i], other.logprobs[i]


class Rounding:
    """An engine whose duck's sums are rounded as told."""

    def __init__(self, model_dir: Path, index_topk: int | None) -> None:
        self._closing = closing_engines()
        self._closing.__enter__()
        overrides = {} if index_topk is None else {"index_topk": index_topk}
        self._llm = start(model_dir, speculates=False, hf_overrides=overrides)
        self._prompts: list[list[int]] = [*NONSENSE, *make_prompts(model_dir)]
        self._ducks = LocalDucks.start(model_dir, num_ducks=1, num_threads=1)
        self._fleet = Fleet.connect(self._ducks.endpoints, reply_dtype="fp32")

    def index_topk(self) -> int:
        # The model's own, also where nothing is left out: the same tokens are compared.
        return 64

    def answers(self, form: str | None, quick: bool) -> tuple[list[Answer], float]:
        """Greedy answers, and the relative error of all sums."""
        from vllm import SamplingParams

        rounded = _RoundedDucks(self._fleet, FORMATS[form] if form else None)
        runner_of(self._llm).attach_ducks(rounded)
        self._llm.reset_prefix_cache()
        prompts = self._prompts[::2] if quick else self._prompts
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
        )
        found = [
            Answer(
                len(prompt),
                list(output.outputs[0].token_ids),
                [max(v.logprob for v in each.values()) for each in _logprobs(output)],
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return found, rounded.error()


def _logprobs(output: Any) -> Sequence[dict[int, Any]]:
    logprobs: Sequence[dict[int, Any]] = output.outputs[0].logprobs
    return logprobs


class _RoundedDucks:
    def __init__(self, ducks: Ducks, form: Callable[[Floats], Floats] | None) -> None:
        self._ducks, self._form = ducks, form
        self._sums = np.zeros(2)

    def send(self, request: MoeRequest) -> "_RoundedSum":
        return _RoundedSum(self._ducks.send(request), self)

    def round(self, total: Floats) -> Floats:
        rounded = total if self._form is None else self._form(total)
        self._sums += np.square(rounded - total).sum(), np.square(total).sum()
        return np.ascontiguousarray(rounded)

    def error(self) -> float:
        return float(np.sqrt(self._sums[0] / self._sums[1]))


@dataclass(frozen=True)
class _RoundedSum:
    pending: InFlight[MoeSum]
    ducks: _RoundedDucks

    def is_done(self) -> bool:
        return self.pending.is_done()

    def wait(self) -> MoeSum:
        total, times = self.pending.wait()
        return MoeSum(self.ducks.round(np.array(total, np.float32)), times)


if __name__ == "__main__":
    main("reply_formats", run, __doc__)
