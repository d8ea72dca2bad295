"""The losses of one step: trunk, MTP layer, and what counts as a target."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.attention import AttentionPlan
from training.model import TinyModel
from training.tokenizer import ASSISTANT, SPECIAL_TOKENS, USER

USER_ID = SPECIAL_TOKENS.index(USER)
ASSISTANT_ID = SPECIAL_TOKENS.index(ASSISTANT)
HARD_DRAFT_WEIGHT = 0.1


@dataclass(frozen=True)
class StepLosses:
    """total is differentiable; the others are plain numbers to log, or None."""

    total: Tensor
    trunk: float
    draft: float | None
    agreement: float | None


def step_losses(
    model: TinyModel, token_ids: Tensor, plan: AttentionPlan, kd_weight: float
) -> StepLosses:
    """Run one batch [B, T + 2] and return its losses; kd_weight 0 skips the MTP."""
    is_target = reply_mask(token_ids)
    hidden = model.trunk(token_ids[:, :-2], plan)
    logits = model.lm_head(hidden)
    next_ids = token_ids[:, 1:-1]
    labels = next_ids.masked_fill(~is_target[:, 1:-1], -100)
    trunk = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    total, draft, agreement = trunk, None, None
    if kd_weight:
        draft_logits = model.lm_head(model.draft(next_ids, hidden, plan))
        hard, soft, agreement = _draft_losses(
            draft_logits[:, :-1], logits[:, 1:], token_ids[:, 2:-1], is_target[:, 2:-1]
        )
        total = total + HARD_DRAFT_WEIGHT * hard + kd_weight * soft
        draft = hard.item()
    total = total + sum(plan.indexer_losses)
    return StepLosses(total, trunk.item(), draft, agreement)


def reply_mask(token_ids: Tensor) -> Tensor:
    """Mark the tokens to learn: all but the user's turns, which nothing predicts."""
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    last_user = positions.where(token_ids == USER_ID, -1).cummax(1).values
    last_reply = positions.where(token_ids == ASSISTANT_ID, 0).cummax(1).values
    return (last_user < 0) | (last_user < last_reply)


def _draft_losses(
    draft_logits: Tensor, trunk_logits: Tensor, labels: Tensor, is_target: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Return (cross entropy to the text, to the trunk's distribution, agreement).

    Row p of draft_logits and of trunk_logits both speak about x[p + 2]. The soft
    target is what acceptance measures; it is detached, so the trunk is not bent.
    """
    log_draft = F.log_softmax(draft_logits[is_target].float(), -1)
    target = F.softmax(trunk_logits[is_target].detach().float(), -1)
    hard = F.nll_loss(log_draft, labels[is_target])
    soft = -(target * log_draft).sum(-1).mean()
    same = log_draft.argmax(-1) == target.argmax(-1)
    return hard, soft, same.float().mean().item()
