"""The training loop: batches from the sampler, one optimizer step each, a bar."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from training.attention import AttentionPlan
from training.config import TinyConfig
from training.corpus import Corpus, Sampler
from training.losses import StepLosses, step_losses
from training.model import TinyModel
from training.optimizer import Optimizer
from training.schedule import ROUNDS, TOKENS_PER_STEP, Phase, Round

BAR_FORMAT = "{percentage:5.1f}% |{bar:20}| {elapsed}<{remaining} {postfix}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a round stops: after num_steps, or, if given, after limit_s seconds.

    With limit_s the schedule follows the clock, so the result depends on the speed
    of the machine.
    """

    num_steps: int
    limit_s: float | None = None

    def progress(self, step: int, elapsed_s: float) -> float:
        return elapsed_s / self.limit_s if self.limit_s else step / self.num_steps


@dataclass(frozen=True)
class Run:
    """A finished round: the model and what it took, earlier rounds included."""

    model: TinyModel
    num_steps: int
    num_tokens: int
    wall_s: float


def train(
    config: TinyConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    budgets: Sequence[Budget],
    *,
    seed: int = 0,
    tokens_per_step: int = TOKENS_PER_STEP,
) -> Run:
    """Train from random weights, one round after the other."""
    torch.manual_seed(seed)
    run = Run(fresh_model(config), 0, 0, 0.0)
    for index, (round_, budget) in enumerate(zip(ROUNDS, budgets, strict=False)):
        sampler = Sampler(corpus, tokenizer, seed + index)
        run = train_round(run, round_, sampler, budget, tokens_per_step=tokens_per_step)
    return run


def train_round(
    before: Run,
    round_: Round,
    sampler: Sampler,
    budget: Budget,
    *,
    tokens_per_step: int = TOKENS_PER_STEP,
) -> Run:
    """Train the model of `before` on; weights are bf16 with fp32 masters."""
    model = before.model.train()
    optimizer = Optimizer(model.named_parameters())
    step = num_tokens = 0
    start = time.monotonic()
    with tqdm(total=100, bar_format=BAR_FORMAT) as bar:
        while (progress := budget.progress(step, time.monotonic() - start)) < 1:
            phase = round_.phase_at(progress)
            length = phase.lengths[step % len(phase.lengths)]
            rows = max(1, tokens_per_step // length)
            batch = torch.from_numpy(sampler.batch(rows, length + 2, phase.mix))
            plan = _plan(phase, step)
            losses = _losses(model, batch, plan, phase)
            optimizer.step(round_.rate_at(progress, step))
            _balance(model, phase)
            step += 1
            num_tokens += rows * length
            if step % 10 == 0:
                speed = num_tokens / (time.monotonic() - start)
                bar.set_postfix_str(_summary(step, phase, losses, plan, speed))
            bar.update(100 * progress - bar.n)
        bar.update(100 - bar.n)
    return Run(
        model.eval(),
        before.num_steps + step,
        before.num_tokens + num_tokens,
        before.wall_s + time.monotonic() - start,
    )


def fresh_model(config: TinyConfig) -> TinyModel:
    """Random weights in bf16."""
    model = TinyModel(config).bfloat16()
    # The router's balance is a sum of small steps, which bf16 would swallow.
    for moe in model.moe_layers():
        moe.gate.e_score_correction_bias = moe.gate.e_score_correction_bias.float()
    return model


def _losses(
    model: TinyModel, batch: Tensor, plan: AttentionPlan, phase: Phase
) -> StepLosses:
    losses = step_losses(model, batch, plan, phase.kd_weight)
    losses.total.backward()
    return losses


def _balance(model: TinyModel, phase: Phase) -> None:
    for moe in model.moe_layers():
        moe.balance(phase.bias_step)


def _plan(phase: Phase, step: int) -> AttentionPlan:
    # Half the step number, so that it alternates independently of two row lengths.
    teaches = phase.teach_every and (step // 2) % phase.teach_every == 0
    return AttentionPlan(is_sparse=phase.is_sparse, trains_indexer=bool(teaches))


def _summary(
    step: int, phase: Phase, losses: StepLosses, plan: AttentionPlan, speed: float
) -> str:
    parts = [f"{phase.name} step {step}", f"{speed:.0f} tok/s"]
    parts.append(f"trunk {losses.trunk:.3f}")
    if losses.draft is not None:
        parts.append(f"mtp {losses.draft:.3f} agree {losses.agreement:.2f}")
    if plan.captured:
        kl = sum(plan.indexer_losses).item() / len(plan.indexer_losses)
        mass = sum(plan.captured).item() / len(plan.captured)
        parts.append(f"kl {kl:.2f} top-k mass {mass:.2f}")
    return ", ".join(parts)
