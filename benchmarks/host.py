"""What a layer costs the host: attention, norms, router and shared expert.

MoE layers in the bundled model's sizes with random weights, one after the other as in
a step, so that their weights do not stay in the L2 cache; the ducks answer at once.
The peer is the same layer in torch (bf16, oneDNN), on the same number of threads.

Where a layer's time goes; and what two lanes add to a pair: all that is not stage 0 of
a step in lanes, which is the split, the order of the stages, and adding up. The ducks
are not real ones, so the stream's own part is in benchmarks.remote_call.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DeepseekV32Config

from benchmarks.common import MODEL_DIR, Result, main
from testing import torch_host
from testing.paged_world import BLOCK_SIZE, PagedWorld, make_batch
from vllm_duck.executor.duck import CallTimes, MoeRequest, MoeSum
from vllm_duck.models.backend import run_layers
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.cpu.backend import CpuBackend
from vllm_duck.models.cpu.layer import CpuLayer
from vllm_duck.models.cpu.moe import PendingMoe
from vllm_duck.models.cpu.packing import pack_modules
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.cpu.threads import Bits, configure, to_bits
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.matrix import Matrix
from vllm_duck.models.rope import Rope
from vllm_duck.spec_decode.lanes.policy import LanePolicy
from vllm_duck.spec_decode.lanes.run import Lanes

NUM_LAYERS = 4
REAL_LAYERS = 58
# A turn's first run finds the caches full of the other's weights.
RUNS_PER_TURN = 3
# (new tokens, context behind them)
CASES = ((1, 511), (2, 510), (64, 448), (512, 0), (2048, 0))


@dataclass
class InstantDucks:
    """Answers zeros at once."""

    shape: tuple[int, ...] = (0, 0)

    def send(self, request: MoeRequest) -> "InstantDucks":
        return InstantDucks(request.hidden.shape)

    def is_done(self) -> bool:
        return True

    def wait(self) -> MoeSum:
        total = np.zeros(self.shape, np.float32)
        return MoeSum(total, CallTimes(time.perf_counter_ns(), 0, 0, 0))


@dataclass
class Step:
    hidden: Tensor
    rotations: Tensor
    batch: AttentionBatch

    @property
    def for_layers(self) -> tuple[Bits, CpuStep]:
        bits = to_bits("hidden", self.hidden, self.hidden.shape[1])
        return bits, CpuStep(self.batch, self.rotations.numpy())


class TorchLayer:
    """The peer: the same weights in torch."""

    def __init__(self, dims: Dimensions, layer: CpuLayer, num_slots: int) -> None:
        weights = {
            name.removeprefix("x.").removeprefix("self_attn."): _copy(view)
            for name, view in layer.checkpoint_views("x")
        }
        self.dims = dims
        self.router = weights["mlp.gate.weight"]
        self.bias = weights["mlp.gate.e_score_correction_bias"]
        shared = "mlp.shared_experts"
        self.gate_up = torch.cat(
            [weights[f"{shared}.{name}_proj.weight"] for name in ("gate", "up")]
        )
        self.down = weights[f"{shared}.down_proj.weight"]
        self.attention = torch_host.TorchAttention(
            dims,
            weights,
            latent_format=layer.attention.latent_cache.format,
            index_format=layer.attention.index_cache.format,
            num_slots=num_slots,
            dtype=torch.bfloat16,
            choose=choose_fast,
        )

    def __call__(self, step: Step) -> Tensor:
        residual, normed = self.attention(step.hidden, step.rotations, step.batch)
        torch_host.route(self.dims, self.router, self.bias, normed)
        return residual + torch_host.mlp(normed, self.gate_up, self.down)


def choose_fast(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """As torch_host.choose, without its rule for equal scores."""
    is_visible = torch.arange(scores.shape[1]) < visible[:, None]
    if scores.shape[1] <= topk:
        return is_visible
    chosen = scores.masked_fill_(~is_visible, float("-inf")).topk(topk, sorted=False)
    return torch.zeros_like(is_visible).scatter_(1, chosen.indices, True) & is_visible


def run(quick: bool, model_dir: Path = MODEL_DIR) -> Iterator[Result]:
    dims = Dimensions.from_hf_config(DeepseekV32Config.from_pretrained(model_dir))
    num_blocks = 4096 // BLOCK_SIZE
    layers, peers = _make_layers(dims, num_blocks)
    rope = Rope(dims.rope, dims.qk_rope_head_dim)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        configure(num_threads)
        for new, context in CASES:
            torch.manual_seed(0)
            table = torch.randperm(num_blocks)[None]
            _fill(layers, peers, dims, rope, table, context)
            if new == 2:
                step = _step(dims, rope, table, new, context)
                yield _lanes_result(layers, step, num_threads, 50 if quick else 200)
            if new == 1:
                step = _step(dims, rope, table, new, context)
                yield from _parts(layers, step, num_threads, 100 if quick else 500)
            step = _step(dims, rope, table, new, context)
            repeats = max(3, (60 if quick else 300) // max(1, new // 16))
            ours_us, peer_us = _best_us(
                lambda step=step: run_layers(layers, *step.for_layers),
                lambda step=step: [peer(step) for peer in peers],
                repeats,
            )
            yield Result(
                f"{new} tokens after {context}, {num_threads} threads",
                "a layer on the host",
                ours_us / NUM_LAYERS,
                "us",
                "torch",
                peer_us / NUM_LAYERS,
            )


def _parts(
    layers: list[CpuLayer], step: Step, num_threads: int, num_steps: int
) -> Iterator[Result]:
    """Where a layer's time goes, with one token."""
    times_us: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any], *args: Any) -> Any:
        begin_s = time.perf_counter()
        found = function(*args)
        times_us.setdefault(name, []).append(1e6 * (time.perf_counter() - begin_s))
        return found

    hidden, planned = step.for_layers
    with torch.inference_mode():
        for _ in range(num_steps):
            for layer in layers:
                residual, normed = timed(
                    "attention block", layer.attention, hidden, planned
                )
                timed("router", layer.mlp.router, normed)
                shared = timed("shared expert", layer.mlp.shared, normed)
                moe = PendingMoe(residual, shared, InstantDucks(normed.shape))
                timed("adding up", moe.wait)
    for name, values in times_us.items():
        yield Result(f"1 token, {num_threads} threads", name, median(values), "us")


def _lanes_result(
    layers: list[CpuLayer], step: Step, num_threads: int, num_steps: int
) -> Result:
    """A pair [x | d] in lanes through as many layers as the real model has."""
    layers = [layers[i % len(layers)] for i in range(REAL_LAYERS)]
    seconds = []
    with torch.inference_mode():
        for _ in range(num_steps):
            lanes = Lanes(CpuBackend(), LanePolicy(overlaps=True, times=None))
            begin_s = time.perf_counter()
            lanes(layers, *step.for_layers)
            seconds.append(time.perf_counter() - begin_s - lanes.meter.total.s0_s)
    return Result(
        f"two lanes, {REAL_LAYERS} layers, {num_threads} threads",
        "what lanes add to a layer pair",
        median(seconds) / len(layers) * 1e6,
        "us",
        target="<= 60",
    )


def _copy(view: Tensor | Matrix) -> Tensor:
    return (view.weight if isinstance(view, Matrix) else view).clone()


def _make_layers(
    dims: Dimensions, num_blocks: int
) -> tuple[list[CpuLayer], list[TorchLayer]]:
    world = PagedWorld(num_blocks)
    layers, peers = [], []
    torch.manual_seed(0)
    with world.building():
        for layer_idx in range(dims.num_leading_dense, NUM_LAYERS + 1):
            caches = LayerCaches.of(dims, "fp8", f"layers.{layer_idx}")
            layer = CpuLayer(dims, layer_idx, caches)
            for name, view in layer.checkpoint_views("x"):
                is_norm = "norm" in name and name.endswith("weight")
                view.copy_(torch.randn(view.shape) * 0.05 + (1.0 if is_norm else 0.0))
            peers.append(TorchLayer(dims, layer, num_blocks * BLOCK_SIZE))
            pack_modules(layer)
            layer.mlp.ducks = InstantDucks()
            layers.append(layer)
    world.allocate()
    return layers, peers


def _step(dims: Dimensions, rope: Rope, table: Tensor, new: int, context: int) -> Step:
    return Step(
        torch.randn(new, dims.hidden_size).bfloat16(),
        rope.rotations(torch.arange(context, context + new)),
        make_batch([new], [context + new], table),
    )


def _fill(
    layers: list[CpuLayer],
    peers: list[TorchLayer],
    dims: Dimensions,
    rope: Rope,
    table: Tensor,
    context: int,
) -> None:
    """Give the caches of both their context."""
    if not context:
        return
    step = _step(dims, rope, table, context, 0)
    for layer, peer in zip(layers, peers, strict=True):
        layer.stage0(*step.for_layers)
        peer(step)


def _best_us(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """The fastest of some runs each; they take turns, as other work may come and go."""
    best_s = [float("inf")] * 2
    with torch.inference_mode():
        for _ in range(-(-repeats // RUNS_PER_TURN)):
            for which, function in enumerate((ours, peer)):
                for _ in range(RUNS_PER_TURN):
                    start_s = time.perf_counter()
                    function()
                    best_s[which] = min(best_s[which], time.perf_counter() - start_s)
    return best_s[0] * 1e6, best_s[1] * 1e6


if __name__ == "__main__":
    main("host", run, __doc__)
