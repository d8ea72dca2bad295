"""Rounds of an engine that answers while faults happen, each compared."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from testing.answers import make_prompts, runner_of, worker_of
from testing.chaos.world import World

NUM_TOKENS = 24
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.1},
)


class Chaos:
    """An engine in a world of faults.

    counts: rounds, faults, requests, and of these `wrong` ones (a token that is not the
    undisturbed one, or an error that names no duck) and `refused` ones (right so far,
    then an error that names a duck).
    """

    def __init__(
        self, llm: Any, model_dir: Path, seed: int, longest_pull_s: float = 3.0
    ) -> None:
        self._llm, self._rng = llm, random.Random(seed)
        self._model_dir, self._longest_pull_s = model_dir, longest_pull_s
        self._prompts = make_prompts(model_dir)
        self.counts: Counter[str] = Counter()

    def run(self, goes_on: Callable[[int], bool]) -> Iterator[str]:
        """Rounds while goes_on(number of rounds); what each did."""
        with ExitStack() as stack:
            world = World(self._model_dir, stack, self._rng, self._longest_pull_s)
            runner_of(self._llm).attach_ducks(world.fleet)
            stack.callback(
                runner_of(self._llm).attach_ducks, worker_of(self._llm).fleet
            )
            expected = [
                [list(each.token_ids) for each in self._ask(self._prompts, sampling)]
                for sampling in SAMPLINGS
            ]
            num_rounds = 0
            while goes_on(num_rounds):
                yield self._round(world, expected)
                num_rounds += 1

    def _round(self, world: World, expected: list[list[list[int]]]) -> str:
        which = self._rng.randrange(len(SAMPLINGS))
        chosen = self._rng.sample(range(len(self._prompts)), self._rng.randrange(1, 6))
        faults = self._rng.choices(world.faults, k=self._rng.randrange(1, 4))
        delays = [self._rng.uniform(0.0, 0.4) for _ in faults]
        started_s = time.monotonic()
        with _meanwhile(faults, delays):
            got = self._ask([self._prompts[i] for i in chosen], SAMPLINGS[which])
        verdicts = Counter(
            _verdict(output, expected[which][i])
            for i, output in zip(chosen, got, strict=True)
        )
        self.counts.update(rounds=1, faults=len(faults), requests=len(chosen))
        self.counts.update(verdicts)
        names = ", ".join(fault.__name__ for fault in faults)
        seconds = time.monotonic() - started_s
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        return f"{names}: {said}, {seconds:.1f} s"

    def _ask(self, prompts: Sequence[list[int]], sampling: dict[str, Any]) -> list[Any]:
        from vllm import SamplingParams

        assert self._llm.reset_prefix_cache()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
            use_tqdm=False,
        )
        return [output.outputs[0] for output in outputs]


def _verdict(output: Any, expected: list[int]) -> str:
    """`right`, `refused` or `wrong`."""
    tokens = list(output.token_ids)
    if output.finish_reason != "error":
        return "right" if tokens == expected else "wrong"
    names_a_duck = str(output.stop_reason).startswith("duck ")
    is_right_so_far = tokens == expected[: len(tokens)]
    return "refused" if names_a_duck and is_right_so_far else "wrong"


@contextmanager
def _meanwhile(
    faults: Sequence[Callable[[], None]], delays: Sequence[float]
) -> Iterator[None]:
    """Faults one after the other, each after its delay; all are over at the end.

    Raises what a fault raised: a world that breaks is no verdict.
    """
    broken: list[Exception] = []

    def run() -> None:
        for fault, delay in zip(faults, delays, strict=True):
            time.sleep(delay)
            try:
                fault()
            except Exception as error:
                broken.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if broken:
        raise broken[0]
