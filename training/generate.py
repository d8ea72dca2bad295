"""Greedy text from a TinyModel, and how often its MTP layer would be accepted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.attention import AttentionPlan
from training.model import TinyModel
from training.tokenizer import EOS, PAD, SPECIAL_TOKENS

EOS_ID = SPECIAL_TOKENS.index(EOS)
PAD_ID = SPECIAL_TOKENS.index(PAD)


@dataclass(frozen=True)
class Acceptance:
    """How many of num_tokens generated tokens the MTP layer had drafted.

    stateful: with its KV history. stateless: every row alone, as without a cache.
    """

    num_tokens: int
    stateful: int
    stateless: int

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.num_tokens + other.num_tokens,
            self.stateful + other.stateful,
            self.stateless + other.stateless,
        )


@torch.no_grad()
def greedy(model: TinyModel, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Return prompt plus reply for each prompt; a reply ends after EOS or max_new.

    Without a KV cache: simple, and exactly what training computes.
    """
    texts = [list(prompt) for prompt in prompts]
    active = list(range(len(texts)))
    for _ in range(max_new):
        lengths = torch.tensor([len(texts[index]) for index in active])
        batch = torch.full((len(active), int(lengths.max())), PAD_ID)
        for row, index in enumerate(active):
            batch[row, : len(texts[index])] = torch.tensor(texts[index])
        hidden = model.trunk(batch, AttentionPlan())
        last = hidden[torch.arange(len(active)), lengths - 1]
        for index, token_id in zip(active, _best(model, last), strict=True):
            texts[index].append(token_id)
        active = [index for index in active if texts[index][-1] != EOS_ID]
        if not active:
            break
    return texts


@torch.no_grad()
def is_greedy_reply(model: TinyModel, prompt: list[int], reply: list[int]) -> bool:
    """Tell whether greedy decoding of prompt gives exactly reply, in one pass."""
    token_ids = torch.tensor([prompt + reply])
    hidden = model.trunk(token_ids[:, :-1], AttentionPlan())
    return _best(model, hidden[0, len(prompt) - 1 :]) == reply


@torch.no_grad()
def acceptance(model: TinyModel, text: list[int], prompt_len: int) -> Acceptance:
    """Compare the MTP layer's drafts with a greedy text, token by token.

    The first generated token has no draft: row p drafts x[p + 2], and the first row
    that knows a generated token is the prompt's last.
    """
    token_ids = torch.tensor([text])
    hidden = model.trunk(token_ids[:, :-1], AttentionPlan())
    target = token_ids[0, prompt_len + 1 :]
    rows = slice(prompt_len - 1, len(text) - 2)

    def num_right(plan: AttentionPlan) -> int:
        drafted = model.draft(token_ids[:, 1:], hidden, plan)[0, rows]
        return int((model.lm_head(drafted).argmax(-1) == target).sum())

    stateful = num_right(AttentionPlan())
    stateless = num_right(AttentionPlan(has_history=False))
    return Acceptance(len(target), stateful, stateless)


def _best(model: TinyModel, hidden: Tensor) -> list[int]:
    return model.lm_head(hidden).float().argmax(-1).tolist()
