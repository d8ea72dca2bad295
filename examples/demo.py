"""The main job in one command: vLLM here, the experts in two duck processes.

    python examples/demo.py [MODEL] [--ducks N]

Without endpoints vllm_duck starts the ducks itself and stops them at the end. The
text is streamed as it is generated; then come the figures.
"""

import argparse
import os
import time
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_duck.models.overlap import Overlap

BUNDLED_MODEL = Path(__file__).parent.parent / "models" / "tiny-v32"
QUESTIONS = (
    "What is 47 + 38?",
    "Is 91 prime?",
    "What does heapq.heappop do?",
    "What is sparse attention?",
)


def main() -> None:
    options = _parse_options()
    # One process for the engine: a demo needs no server.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    print(f"Starting vLLM and {options.ducks} ducks ...", flush=True)
    started_s = time.perf_counter()
    llm = LLM(
        model=str(options.model),
        max_model_len=2048,
        # The checkpoint's own MTP layer drafts; `--no-drafts` decodes without.
        speculative_config={"method": "duck_mtp1"} if options.drafts else None,
        disable_log_stats=False,
        additional_config={"duck": {"local_ducks": options.ducks}},
    )
    print(f"Ready after {time.perf_counter() - started_s:.1f} s.\n", flush=True)

    num_tokens = 0
    decode_s = 0.0
    for request_id, question in enumerate(QUESTIONS):
        print(f"> {question}", flush=True)
        tokens, seconds = stream(llm, str(request_id), question)
        num_tokens += tokens
        decode_s += seconds
        print("\n", flush=True)

    print_figures(llm, num_tokens, decode_s)


def stream(llm: LLM, request_id: str, question: str) -> tuple[int, float]:
    """Print one answer as it comes; returns its tokens after the first, and seconds."""
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
    text, num_tokens, first_s = "", 0, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s = first_s or time.perf_counter()
            completion = output.outputs[0]
            print(completion.text[len(text) :], end="", flush=True)
            text, num_tokens = completion.text, len(completion.token_ids)
    return num_tokens - 1, time.perf_counter() - first_s


def print_figures(llm: LLM, num_tokens: int, decode_s: float) -> None:
    (figures,) = llm.collective_rpc("duck_figures")
    print(f"decode  {num_tokens / decode_s:.1f} tok/s ({num_tokens} tokens, one user)")
    print_acceptance(llm, num_tokens)
    (steps,) = llm.collective_rpc("step_figures")
    print(f"lanes   {Overlap(**steps['overlap'])}")
    print(f"host    {figures['host_bytes'] / 1e6:,.0f} MB resident")
    print(f"calls   by {figures['transport']}")
    for duck in figures["ducks"]:
        print(
            f"duck    {duck['resident_bytes'] / 1e6:,.0f} MB resident, "
            f"{duck['num_calls']} calls, median {duck['rtt_us']:.0f} us of which "
            f"compute {duck['compute_us']:.0f} us; {duck['shard']}"
        )


def print_acceptance(llm: LLM, num_tokens: int) -> None:
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafted = int(counts.get("vllm:spec_decode_num_draft_tokens", 0))
    accepted = int(counts.get("vllm:spec_decode_num_accepted_tokens", 0))
    if drafted:
        num_steps = num_tokens - accepted
        print(
            f"drafts  accepted {accepted}/{drafted} = {accepted / drafted:.0%}, "
            f"{num_tokens / num_steps:.2f} tokens per step"
        )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--ducks", type=int, default=2, help="duck processes (2)")
    parser.add_argument(
        "--no-drafts", dest="drafts", action="store_false", help="decode plainly"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
