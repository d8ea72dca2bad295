"""The command that measures a checkpoint: python -m training.evaluate FOLDER."""

import argparse
import random
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from training.attention import AttentionPlan
from training.chains import MAKERS, Problem, problems
from training.corpus import Corpus, Mix, Sampler
from training.export import read_model, write_dequantized
from training.generate import Acceptance, acceptance, greedy, is_greedy_reply
from training.losses import reply_mask
from training.model import TinyModel
from training.tokenizer import BOS, conversation, prompt

POSITION_EDGES = (0, 512, 1024, 1536)
ORACLE_LENGTHS = (32, 64, 128, 600, 1536)
DESCRIPTION = """
Measure a checkpoint without a server: right answers, MTP acceptance with and without
history, loss by position, and agreement with transformers' independent model.
"""


def main(argv: list[str] | None = None) -> None:
    args = _parse_args(argv)
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    # bf16 is what engines compute in; fp8 weights are exact in it.
    model = read_model(args.folder, torch.bfloat16)
    corpus = Corpus()
    print_answers(model, tokenizer, args.problems)
    print_acceptance(model, tokenizer, corpus, args.prompts)
    print_losses(model, tokenizer, corpus)
    print_oracle(args.folder, tokenizer, corpus)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate", description=DESCRIPTION
    )
    parser.add_argument("folder", type=Path, help="a checkpoint folder")
    parser.add_argument(
        "--problems",
        type=int,
        default=200,
        help="problems of each kind and side (default %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=20,
        help="prompts for each acceptance row (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    return parser.parse_args(argv)


def print_answers(model: TinyModel, tokenizer: Tokenizer, count: int) -> None:
    """Print how many replies are right in full: every step and the answer."""
    print("\nwhole reply right (greedy)   chat: trained     held out")
    print("                         thinking: trained     held out")
    for kind in MAKERS:
        cells = []
        for thinking in (False, True):
            for side in (False, True):
                asked = problems(kind, count, is_held_out=side)
                cells.append(_right_share(model, tokenizer, asked, thinking))
        print(f"  {kind:24} {cells[0]:>16} {cells[1]:>12}")
        print(f"  {'':24} {cells[2]:>16} {cells[3]:>12}")


def print_acceptance(
    model: TinyModel, tokenizer: Tokenizer, corpus: Corpus, count: int
) -> None:
    """Print the share of greedy tokens the MTP layer drafted right."""
    print("\nMTP acceptance (greedy)      tokens  history   none  ratio")
    rng = random.Random(0)
    entries = rng.sample(corpus.entries, count)
    chains = [
        problem
        for kind in MAKERS
        for problem in problems(kind, count // len(MAKERS), is_held_out=kind != "prime")
    ]
    rows = {
        "chains, chat": [prompt(problem.question) for problem in chains],
        "chains, thinking": [prompt(p.question, thinking=True) for p in chains],
        "documentation, trained": [prompt(entry.question) for entry in entries],
        "topics, held out": [
            BOS + chunk[:160] for t in corpus.held_out_topics for chunk in t.chunks
        ][:count],
    }
    for name, texts in rows.items():
        total = _acceptance(model, _encode(tokenizer, texts))
        stateful = total.stateful / total.num_tokens
        stateless = total.stateless / total.num_tokens
        ratio = stateful / max(stateless, 1e-9)
        print(
            f"  {name:24} {total.num_tokens:8} {stateful:8.3f} {stateless:6.3f}"
            f" {ratio:6.2f}"
        )


def print_losses(model: TinyModel, tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Print the trunk's loss by position, in text longer than a training row."""
    spans = [f"{a}-{b}" for a, b in pairwise(POSITION_EDGES)]
    print(f"\nloss by position            {' '.join(f'{s:>10}' for s in spans)}")
    length = POSITION_EDGES[-1] + 1
    sampler = Sampler(corpus, tokenizer, seed=1)
    only_chains = Mix(entries=0, topics=0, talk=0, long_chat=1, thinking=0)
    chats = sampler.batch(8, length, only_chains).tolist()
    topics = _encode(tokenizer, [_long_text(t.chunks) for t in corpus.held_out_topics])
    rows = {
        "chains, many turns": chats,
        "topics, held out": [text[:length] for text in topics if len(text) >= length],
    }
    for name, texts in rows.items():
        losses = _losses_by_position(model, texts)
        print(f"  {name:24}  {' '.join(f'{loss:10.3f}' for loss in losses)}")


def print_oracle(folder: Path, tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Print how far transformers' fp32 logits are from ours."""
    from transformers import DeepseekV32ForCausalLM

    with tempfile.TemporaryDirectory() as copy:
        write_dequantized(folder, Path(copy))
        oracle = DeepseekV32ForCausalLM.from_pretrained(
            copy, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    model = read_model(folder, torch.float32)
    text = _long_text(corpus.held_out_topics[1].chunks)
    token_ids = torch.tensor(_encode(tokenizer, [text]))
    print("\nagainst transformers, fp32   max |diff|   same top-1")
    for length in ORACLE_LENGTHS:
        with torch.no_grad():
            theirs = oracle(token_ids[:, :length]).logits
            ours = model.lm_head(model.trunk(token_ids[:, :length], AttentionPlan()))
        same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
        largest = (theirs - ours).abs().max()
        print(f"  {length:5} tokens              {largest:10.1e} {same:12.4f}")


def _right_share(
    model: TinyModel, tokenizer: Tokenizer, asked: list[Problem], thinking: bool
) -> str:
    if not asked:
        return "none"
    num_right = 0
    for problem in asked:
        opening = prompt(problem.question, thinking=thinking)
        whole = conversation([problem.turn(thinking=thinking)], thinking=thinking)
        question, reply = _encode(tokenizer, [opening, whole.removeprefix(opening)])
        num_right += is_greedy_reply(model, question, reply)
    return f"{num_right}/{len(asked)} {num_right / len(asked):4.0%}"


def _acceptance(model: TinyModel, prompts: list[list[int]]) -> Acceptance:
    total = Acceptance(0, 0, 0)
    texts = greedy(model, prompts, max_new=160)
    for asked, text in zip(prompts, texts, strict=True):
        total += acceptance(model, text, len(asked))
    return total


@torch.no_grad()
def _losses_by_position(model: TinyModel, texts: list[list[int]]) -> list[float]:
    token_ids = torch.tensor(texts)
    hidden = model.trunk(token_ids[:, :-1], AttentionPlan())
    logits = model.lm_head(hidden).float()
    losses = F.cross_entropy(logits.mT, token_ids[:, 1:], reduction="none")
    is_target = reply_mask(token_ids)[:, 1:]
    spans = pairwise(POSITION_EDGES)
    return [losses[:, a:b][is_target[:, a:b]].mean().item() for a, b in spans]


def _long_text(chunks: Iterable[str]) -> str:
    return BOS + "\n\n".join(chunks)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encoded]


if __name__ == "__main__":
    main()
