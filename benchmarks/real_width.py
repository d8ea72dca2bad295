"""The CPU host at DeepSeek-V3.2's true widths, from a random e4m3 checkpoint.

A few layers (one dense, then MoE layers with 16 experts, which stay where they are:
the ducks answer at once) and a bf16 head. `load_gbs` is the checkpoint's bytes a second
into packed form, cold and from the page cache; beside it one thread that reads the same
files into memory. `memory_ratio` is the growth of the process's own memory while it
loads over the tensors' bytes. `decode_floor_fraction` is the time that this machine's
threads need to read the weights as they are in the checkpoint, over the time of a step;
beside it torch's bf16 matrix products of the same shapes. `prefill_matmul_fraction` is
the rate of arithmetic over that of torch's fp32 matmul on the same shapes.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV32Config

from benchmarks.common import Result, main
from benchmarks.host import InstantDucks
from benchmarks.peers.read_memory import bytes_per_s
from testing.engines import Held, held_in_process
from testing.paged_world import BLOCK_SIZE, PagedWorld, make_batch
from vllm_duck.executor.system.cpus import within_quota
from vllm_duck.models.backend import run_layers
from vllm_duck.models.cpu.layer import CpuLayer
from vllm_duck.models.cpu.linear import Linear
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.cpu.threads import configure, from_bits, to_bits
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.matrix import BLOCK, E4M3, Matrix
from vllm_duck.models.rope import Rope

NUM_LAYERS, NUM_LAYERS_QUICK = 4, 2
CONTEXT = 64
PREFILL_ROWS, PREFILL_ROWS_QUICK = 512, 128
REPEATS, REPEATS_QUICK = 12, 5

# The official config.json, but for what is said above.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# As in the official checkpoint; all other matrices are e4m3.
_BF16 = ("weights_proj", "lm_head")


def run(quick: bool) -> Iterator[Result]:
    num_layers = NUM_LAYERS_QUICK if quick else NUM_LAYERS
    with tempfile.TemporaryDirectory() as directory:
        files = write_checkpoint(Path(directory), num_layers)
        for is_cold in (True, False):
            with held_in_process(WideHost, num_layers) as host:
                if is_cold:
                    _forget(files)
                yield from _loading(host, files, "cold" if is_cold else "cached")
                if not is_cold:
                    yield from _running(host, quick)


def _loading(host: Held, files: Sequence[Path], name: str) -> Iterator[Result]:
    found = host.ask("load", files)
    _forget(files) if name == "cold" else None
    peer = _read_gbs(files)
    case = f"host layers and head, {name}"
    gbs = found["bytes"] / found["seconds"] / 1e9
    yield Result(case, "load_gbs", gbs, "GB/s", "one reader", peer, ">= 0.6 of it")
    if name == "cached":
        ratio = found["grown"] / found["bytes"]
        yield Result(case, "memory_ratio", ratio, "", target="<= 1.1")


def _running(host: Held, quick: bool) -> Iterator[Result]:
    repeats = REPEATS_QUICK if quick else REPEATS
    for rows in (1, 2):
        for with_head in (False, True):
            found = host.ask("decode", rows, with_head, repeats)
            yield Result(
                f"host {'with head' if with_head else 'layers'}, {rows} rows",
                "decode_floor_fraction",
                found["floor_s"] / found["seconds"],
                "",
                "torch bf16",
                found["floor_s"] / found["peer_s"],
                "" if with_head else ">= 0.9",
            )
    rows = PREFILL_ROWS_QUICK if quick else PREFILL_ROWS
    found = host.ask("prefill", rows, 2 if quick else 4)
    fraction = found["flops_s"] / found["peer_flops_s"]
    case = f"host layers, {rows} rows"
    yield Result(case, "prefill_matmul_fraction", fraction, "", target=">= 0.8")


@dataclass
class WideHost:
    """A few layers and a head, in a process of their own."""

    num_layers: int
    layers: list[CpuLayer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_threads = within_quota(os.cpu_count() or 1)
        torch.set_num_threads(self.num_threads)
        configure(self.num_threads)
        self.dims = _dims(self.num_layers)
        self.world = PagedWorld(-(-2048 // BLOCK_SIZE))
        with self.world.building():
            for layer_idx in range(self.num_layers):
                caches = LayerCaches.of(self.dims, "fp8", f"layers.{layer_idx}")
                self.layers.append(CpuLayer(self.dims, layer_idx, caches))
        self.head = Linear(self.dims.hidden_size, self.dims.vocab_size)
        self.shapes = [
            (name, view.shape) for name, view in self._views() if len(view.shape) == 2
        ]

    def load(self, files: Sequence[Path]) -> dict[str, float]:
        """Seconds, bytes, and by how much this process has grown."""
        from safetensors import safe_open

        before, start_s = _own_bytes(), time.perf_counter()
        tensors: dict[str, Tensor] = {}
        for path in files:
            with safe_open(path, "pt") as opened:
                names = opened.keys()
                tensors |= {name: opened.get_tensor(name) for name in names}
        for name, view in self._views():
            if isinstance(view, Matrix):
                view.put(name, tensors[name], tensors.get(f"{name}_scale_inv"))
            else:
                view.copy_(tensors[name])
        for part in (*self.layers, self.head):
            part.finish_loading()
        seconds = time.perf_counter() - start_s
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.head_bytes = tensors["lm_head.weight"].nbytes
        del tensors
        grown = _own_bytes() - before
        self.layer_bytes = num_bytes - self.head_bytes
        self.world.allocate()
        for layer in self.layers[1:]:
            layer.attach_ducks(InstantDucks())
        out = run_layers(self.layers, *self._step(CONTEXT, 0))
        assert np.isfinite(from_bits(out).float().numpy()).all()
        return {"seconds": seconds, "bytes": num_bytes, "grown": grown}

    def decode(self, rows: int, with_head: bool, repeats: int) -> dict[str, float]:
        """Seconds of a step, of torch's products, and of reading the weights."""
        hidden, step = self._step(rows)
        x = torch.randn(rows, self.dims.hidden_size).bfloat16()

        def ours() -> None:
            run_layers(self.layers, hidden, step)
            if with_head:
                self.head(x)

        shapes = [s for name, s in self.shapes if with_head or "lm_head" not in name]
        peer = partial(_products, rows, shapes, torch.bfloat16)
        num_bytes = self.layer_bytes + (self.head_bytes if with_head else 0)
        turns = [
            (_seconds(ours), peer(), num_bytes / bytes_per_s(self.num_threads))
            for _ in range(repeats)
        ]
        seconds, peer_s, floor_s = (median(side) for side in zip(*turns, strict=True))
        return {"seconds": seconds, "peer_s": peer_s, "floor_s": floor_s}

    def prefill(self, rows: int, repeats: int) -> dict[str, float]:
        """Arithmetic of the layers' matrices a second: in the layers, and in torch."""
        hidden, step = self._step(rows)
        shapes = [shape for name, shape in self.shapes if "lm_head" not in name]
        flops = sum(2 * rows * out * size for out, size in shapes)
        turns = [
            (
                _seconds(lambda: run_layers(self.layers, hidden, step)),
                _products(rows, shapes, torch.float32),
            )
            for _ in range(repeats)
        ]
        seconds, peer_s = (median(side) for side in zip(*turns, strict=True))
        return {"flops_s": flops / seconds, "peer_flops_s": flops / peer_s}

    def _views(self) -> Iterator[tuple[str, Tensor | Matrix]]:
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.checkpoint_views(f"model.layers.{layer_idx}")
        yield from self.head.checkpoint_views("lm_head")

    def _step(self, rows: int, context: int = CONTEXT) -> tuple[Any, CpuStep]:
        dims = self.dims
        hidden = torch.randn(rows, dims.hidden_size).bfloat16()
        rope = Rope(dims.rope, dims.qk_rope_head_dim)
        rotations = rope.rotations(torch.arange(context, context + rows))
        table = torch.arange(self.world.num_blocks)[None]
        batch = make_batch([rows], [context + rows], table)
        bits = to_bits("hidden", hidden, dims.hidden_size)
        return bits, CpuStep(batch, rotations.numpy())


def write_checkpoint(directory: Path, num_layers: int) -> list[Path]:
    """The tensors of the layers and the head, a file for each layer."""
    world = PagedWorld(1)
    with world.building():
        dims = _dims(num_layers)
        layers = [
            CpuLayer(dims, i, LayerCaches.of(dims, "fp8", f"layers.{i}"))
            for i in range(num_layers)
        ]
    # As of weights whose largest in a block became 448.
    pool = (torch.randn(1 << 24) * 100).clamp(-448, 448).to(E4M3)
    files = []
    for layer_idx, layer in enumerate(layers):
        views = dict(layer.checkpoint_views(f"model.layers.{layer_idx}"))
        if layer_idx == num_layers - 1:
            views["lm_head.weight"] = Matrix(dims.vocab_size, dims.hidden_size)
        tensors: dict[str, Tensor] = {}
        for name, view in views.items():
            tensors |= _random(name, view, pool)
        files.append(directory / f"{layer_idx}.safetensors")
        save_file(tensors, files[-1])
    return files


def _random(name: str, view: Tensor | Matrix, pool: Tensor) -> dict[str, Tensor]:
    if isinstance(view, Tensor):
        is_norm = "norm" in name and name.endswith("weight")
        noise = torch.randn(view.shape) * 0.01 + (1.0 if is_norm else 0.0)
        return {name: noise.to(view.dtype)}
    rows, columns = view.shape
    if any(part in name for part in _BF16):
        noise = torch.randn(1 << 20).bfloat16() * columns**-0.5
        copies = -(-rows * columns // len(noise))
        return {name: noise.repeat(copies)[: rows * columns].view(view.shape)}
    codes = pool.repeat(-(-rows * columns // len(pool)))[: rows * columns]
    scale = torch.full((-(-rows // BLOCK), -(-columns // BLOCK)), 1e-2 * columns**-0.5)
    scaled = scale * (1 + torch.rand(scale.shape))
    return {name: codes.view(view.shape), f"{name}_scale_inv": scaled}


def _dims(num_layers: int) -> Dimensions:
    return Dimensions.from_hf_config(
        DeepseekV32Config(**CONFIG, num_hidden_layers=num_layers)
    )


def _products(rows: int, shapes: Sequence[torch.Size], dtype: torch.dtype) -> float:
    """Seconds of torch's matrix products of these shapes, weights fresh from memory."""
    largest = max(out * size for out, size in shapes)
    weights = _weights(largest, dtype)
    total_s = 0.0
    for at, (out, size) in enumerate(shapes):
        weight = weights[at % len(weights)][: out * size].view(out, size)
        x = torch.ones(rows, size, dtype=dtype)
        total_s += _seconds(partial(torch.nn.functional.linear, x, weight))
    return total_s


_made: dict[tuple[int, torch.dtype], list[Tensor]] = {}


def _weights(size: int, dtype: torch.dtype) -> list[Tensor]:
    key = (size, dtype)
    if key not in _made:
        _made.clear()
        _made[key] = [torch.ones(size, dtype=dtype)]
    return _made[key]


def _seconds(call: Any) -> float:
    with torch.inference_mode():
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s


def _own_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def _forget(files: Sequence[Path]) -> None:
    """Take the files out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_gbs(files: Sequence[Path]) -> float:
    """Of one thread that reads the files into memory, where they stay."""
    start_s = time.perf_counter()
    contents = [path.read_bytes() for path in files]
    seconds = time.perf_counter() - start_s
    return sum(map(len, contents)) / seconds / 1e9


if __name__ == "__main__":
    main("real_width", run, __doc__)
