"""The optimizer: Muon for matrices, Adam for the rest, fp32 masters for bf16."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MUON_RATE = 0.02
# The indexer sees a moving target (the attention); it is taught more gently.
INDEXER_SHARE = 0.5
ADAM_RATES = {"embed_tokens": 4e-3, "gate.weight": 1e-3}
ADAM_RATE = 3e-3
# Not matrices in Muon's sense: rows are looked up or read one by one.
ADAM_NAMES = ("embed_tokens", "lm_head", "gate.weight", "weights_proj")


@dataclass
class _Slot:
    """One parameter's master copy and moments, all fp32."""

    param: nn.Parameter
    master: Tensor
    rate: float
    momentum: Tensor
    variance: Tensor | None = None
    num_updates: int = 0


class Optimizer:
    def __init__(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._muon: list[_Slot] = []
        self._adam: list[_Slot] = []
        for name, param in named_params:
            master = param.detach().float().clone()
            zeros = torch.zeros_like(master)
            if param.dim() >= 2 and not any(part in name for part in ADAM_NAMES):
                rate = MUON_RATE * (INDEXER_SHARE if "indexer" in name else 1)
                self._muon.append(_Slot(param, master, rate, zeros))
            else:
                rates = (rate for part, rate in ADAM_RATES.items() if part in name)
                rate = next(rates, ADAM_RATE)
                self._adam.append(_Slot(param, master, rate, zeros, zeros.clone()))

    @torch.no_grad()
    def step(self, rate_factor: float) -> None:
        """Apply and clear the gradients; parameters without one are left alone."""
        for slot in self._muon:
            if slot.param.grad is not None:
                _muon_update(slot, rate_factor)
        for slot in self._adam:
            if slot.param.grad is not None:
                _adam_update(slot, rate_factor)


def _muon_update(slot: _Slot, rate_factor: float, momentum: float = 0.95) -> None:
    grad = slot.param.grad.float()
    slot.momentum.lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp_(slot.momentum, momentum)).float()
    rows, columns = slot.master.shape[-2:]
    rate = rate_factor * slot.rate
    slot.master.mul_(1 - rate * 0.02)
    slot.master.add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
    _publish(slot)


def _adam_update(
    slot: _Slot, rate_factor: float, beta1: float = 0.9, beta2: float = 0.98
) -> None:
    grad = slot.param.grad.float()
    slot.num_updates += 1
    slot.momentum.lerp_(grad, 1 - beta1)
    slot.variance.lerp_(grad.square(), 1 - beta2)
    mean = slot.momentum / (1 - beta1**slot.num_updates)
    spread = (slot.variance / (1 - beta2**slot.num_updates)).sqrt_().add_(1e-10)
    slot.master.addcdiv_(mean, spread, value=-rate_factor * slot.rate)
    _publish(slot)


def _publish(slot: _Slot) -> None:
    slot.param.copy_(slot.master)
    slot.param.grad = None


def orthogonalize(grad: Tensor, num_steps: int = 5) -> Tensor:
    """Return the nearest semi-orthogonal matrix (batched over leading dims), bf16.

    Source: Muon (github.com/KellerJordan/Muon), zeropower_via_newtonschulz5.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = grad.bfloat16().view(-1, *grad.shape[-2:])
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
        )
    x = x.mT if is_tall else x
    return x.reshape(grad.shape)
