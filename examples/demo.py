"""The main job in one command: vLLM here, the experts in two duck processes.

    python examples/demo.py [MODEL] [--ducks N] [--no-drafts] [--verbose]

Without endpoints vllm_duck starts the ducks itself and stops them at the end. Lines
with seconds say what the start is doing; then the text is streamed as it is generated,
and then come the figures, which leave out a first answer that warms everything up.
"""

import argparse
import logging
import os
import time
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_duck.executor.system.cpus import physical_cores

if TYPE_CHECKING:
    from vllm import LLM

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "tiny-v32"
WARM_UP = "What is 1 + 1?"
QUESTIONS = (
    "What is 47 + 38?",
    "Is 91 prime?",
    "What does heapq.heappop do?",
    "What is sparse attention?",
)

_started_s = time.perf_counter()


class Decode(NamedTuple):
    """Tokens after the first, and the steps and seconds that they took."""

    num_tokens: int
    num_steps: int
    seconds: float


class Counts(NamedTuple):
    """What the engine has counted since its start."""

    drafted: int
    accepted: int
    overlap: Any


def main() -> None:
    options = _parse_options()
    choose(os.environ)
    if not options.verbose:
        hush(os.environ)
    say("importing vLLM (the longest part)")
    llm = start(options)
    say("warming up: a first answer")
    stream(llm, "warm-up", WARM_UP, is_shown=False)
    before = read_counts(llm)
    say("ready\n")

    answers = []
    for request_id, question in enumerate(QUESTIONS):
        print(f"> {question}", flush=True)
        answers.append(stream(llm, str(request_id), question))
        print("\n", flush=True)

    total = Decode(*(sum(column) for column in zip(*answers, strict=True)))
    print_figures(llm, before, total)


def say(text: str) -> None:
    print(f"{time.perf_counter() - _started_s:5.1f} s  {text}", flush=True)


def choose(environ: MutableMapping[str, str]) -> None:
    """How vLLM runs; it reads that when it is imported."""
    # A demo needs no server: in one process vLLM is imported once, not three times.
    environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # As many threads as a server's worker gets: one core is left to the others.
    environ.setdefault("OMP_NUM_THREADS", str(max(1, len(physical_cores()) - 1)))


def hush(environ: MutableMapping[str, str]) -> None:
    """Show errors and the package's own lines only.

    vLLM's warnings (Triton, OpenMP, tcmalloc ...) are about its own CPU kernels, which
    duck does not use.
    """
    environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    duck = logging.getLogger("vllm_duck")
    duck.setLevel(logging.INFO)
    duck.addHandler(Progress())


class Progress(logging.Handler):
    """The package's own lines are the progress: ducks started, weights read."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def start(options: argparse.Namespace) -> "LLM":
    from vllm import LLM

    say("starting the engine (nothing is compiled)")
    return LLM(
        model=str(options.model),
        max_model_len=2048,
        # One user: the caches take 130 MB, not 2 GB.
        max_num_seqs=16,
        # The checkpoint's own MTP layer drafts; `--no-drafts` decodes without.
        speculative_config={"method": "duck_mtp1"} if options.drafts else None,
        disable_log_stats=False,
        additional_config={"duck": {"local_ducks": options.ducks}},
    )


def stream(
    llm: "LLM", request_id: str, question: str, *, is_shown: bool = True
) -> Decode:
    """Print one answer as it comes."""
    from vllm import SamplingParams

    messages = [{"role": "user", "content": question}]
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    engine = llm.llm_engine
    engine.add_request(
        request_id,
        {"prompt_token_ids": token_ids},
        SamplingParams(temperature=0.0, max_tokens=300),
    )
    text, num_tokens, num_outputs, first_s = "", 0, 0, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s = first_s or time.perf_counter()
            completion = output.outputs[0]
            if is_shown:
                print(completion.text[len(text) :], end="", flush=True)
            text, num_tokens = completion.text, len(completion.token_ids)
            num_outputs += 1
    return Decode(num_tokens - 1, num_outputs - 1, time.perf_counter() - first_s)


def read_counts(llm: "LLM") -> Counts:
    from vllm_duck.spec_decode.lanes.times import Overlap

    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    (steps,) = llm.collective_rpc("step_figures")
    return Counts(
        drafted=int(values.get("vllm:spec_decode_num_draft_tokens", 0)),
        accepted=int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
        overlap=Overlap.from_figures(steps["overlap"]),
    )


def print_figures(llm: "LLM", before: Counts, decode: Decode) -> None:
    after = read_counts(llm)
    (figures,) = llm.collective_rpc("duck_figures")
    print(
        f"decode  {decode.num_tokens / decode.seconds:.1f} tok/s "
        f"({decode.num_tokens} tokens, one user)"
    )
    drafted = after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    if drafted:
        print(
            f"drafts  accepted {accepted}/{drafted} = {accepted / drafted:.0%}, "
            f"{decode.num_tokens / decode.num_steps:.2f} tokens per step"
        )
    print(f"lanes   {after.overlap - before.overlap}")
    print("        (a step whose lanes are measured slower stays whole: docs/lanes.md)")
    print(f"host    {figures['host_bytes'] / 1e6:,.0f} MB resident")
    print(f"calls   by {figures['transport']}")
    for duck in figures["ducks"]:
        print(
            f"duck    {duck['resident_bytes'] / 1e6:,.0f} MB resident, "
            f"{duck['num_calls']} calls, median {duck['rtt_us']:.0f} us of which "
            f"compute {duck['compute_us']:.0f} us; {duck['shard']}"
        )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--ducks", type=int, default=2, help="duck processes (2)")
    parser.add_argument(
        "--no-drafts", dest="drafts", action="store_false", help="decode plainly"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show vLLM's own log and warnings"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
