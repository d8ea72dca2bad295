"""A small model for the executor's tests: its checkpoint, requests, and a reference."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from testing.ducks.bf16 import f32_to_bf16
from vllm_duck.executor.duck import (
    PROTOCOL_VERSION,
    DuckInfo,
    ModelSummary,
    MoeRequest,
    Shard,
)
from vllm_duck.executor.wire import codec
from vllm_duck.executor.wire.bf16 import bf16_to_f32

HIDDEN_SIZE = 32
NUM_COLUMNS = 160
NUM_EXPERTS = 4
# Layer 0 is dense, 1 and 2 are the target's MoE layers, 3 is the MTP layer.
LAYER_IDS = (1, 2, 3)
WHOLE = Shard(0, NUM_COLUMNS, 0, NUM_EXPERTS)

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": HIDDEN_SIZE,
    "moe_intermediate_size": NUM_COLUMNS,
    "n_routed_experts": NUM_EXPERTS,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def expert_name(layer_idx: int, expert_id: int, projection: str) -> str:
    return f"model.layers.{layer_idx}.mlp.experts.{expert_id}.{projection}_proj.weight"


@dataclass
class MiniModel:
    """A checkpoint to be damaged and then written."""

    config: dict = field(default_factory=lambda: dict(CONFIG))
    # Name to (dtype as safetensors spells it, array of bits).
    tensors: dict = field(default_factory=dict)
    # None: one file without an index.
    num_files: int | None = None
    # Names that the index leaves out.
    unlisted: set = field(default_factory=set)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.num_files is None:
            write_safetensors(directory / "model.safetensors", self.tensors)
            return directory
        weight_map = {}
        for index in range(self.num_files):
            file_name = f"model-{index:05d}.safetensors"
            names = sorted(self.tensors)[index :: self.num_files]
            part = {name: self.tensors[name] for name in names}
            write_safetensors(directory / file_name, part)
            weight_map.update(dict.fromkeys(names, file_name))
        for name in self.unlisted:
            del weight_map[name]
        index_path = directory / "model.safetensors.index.json"
        index_path.write_text(json.dumps({"weight_map": weight_map}))
        return directory

    def bf16_weights(self, layer_idx: int, expert_id: int) -> list[np.ndarray]:
        """gate, up, down of a bf16 model as float32."""
        return [
            bf16_to_f32(self.tensors[expert_name(layer_idx, expert_id, projection)][1])
            for projection in ("gate", "up", "down")
        ]


def write_safetensors(path: Path, tensors: dict) -> None:
    """The format by hand: numpy's writer knows neither e4m3 nor our bits as bf16."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_mini_model(weight_format: str = "bf16", seed: int = 0) -> MiniModel:
    rng = np.random.default_rng(seed)
    model = MiniModel()
    model.tensors["model.layers.3.enorm.weight"] = ("BF16", np.zeros(4, np.uint16))
    if weight_format != "bf16":
        model.config["quantization_config"] = FP8
    shapes = {
        "gate": (NUM_COLUMNS, HIDDEN_SIZE),
        "up": (NUM_COLUMNS, HIDDEN_SIZE),
        "down": (HIDDEN_SIZE, NUM_COLUMNS),
    }
    for layer_idx in LAYER_IDS:
        for expert_id in range(NUM_EXPERTS):
            for projection, shape in shapes.items():
                name = expert_name(layer_idx, expert_id, projection)
                if weight_format == "bf16":
                    values = 0.2 * rng.standard_normal(shape)
                    bits = f32_to_bf16(values.astype(np.float32))
                    model.tensors[name] = ("BF16", bits)
                    continue
                # Finite e4m3 of moderate size, both signs.
                bits = rng.integers(0, 0x50, shape) | 0x80 * rng.integers(0, 2, shape)
                model.tensors[name] = ("F8_E4M3", bits.astype(np.uint8))
                blocks = [-(-size // 128) for size in shape]
                scales = 0.01 + 0.02 * rng.random(blocks)
                model.tensors[f"{name}_scale_inv"] = ("F32", scales.astype(np.float32))
    return model


def make_request(
    num_rows: int = 3,
    *,
    layer_idx: int = 2,
    hidden_size: int = HIDDEN_SIZE,
    num_experts: int = NUM_EXPERTS,
    seed: int = 0,
) -> MoeRequest:
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((num_rows, hidden_size)).astype(np.float32)
    ids = np.stack([rng.permutation(num_experts)[:2] for _ in range(num_rows)])
    return MoeRequest(
        layer_idx=layer_idx,
        hidden=f32_to_bf16(hidden),
        topk_ids=ids.astype(np.int32),
        topk_weights=rng.random((num_rows, 2)).astype(np.float32),
    )


def encode_long_request() -> bytes:
    """A message of 4 MB: 280 rows of 7168 zeros."""
    rows, hidden_size = 280, 7168
    request = MoeRequest(
        layer_idx=2,
        hidden=np.zeros((rows, hidden_size), np.uint16),
        topk_ids=np.zeros((rows, 1), np.int32),
        topk_weights=np.zeros((rows, 1), np.float32),
    )
    return codec.encode_request(request, request_id=1, reply_dtype="bf16")


def make_info(shard: Shard = WHOLE, **changes: object) -> DuckInfo:
    fields = {
        "protocol_version": PROTOCOL_VERSION,
        "model_fingerprint": "f00d",
        "layer_ids": LAYER_IDS,
        "shard": shard,
        "hidden_size": HIDDEN_SIZE,
        "moe_intermediate_size": NUM_COLUMNS,
        "n_routed_experts": NUM_EXPERTS,
        "weight_format": "bf16",
        "isa": "portable",
        "num_threads": 1,
        "weight_bytes": 123,
        "resident_bytes": 456,
    }
    return DuckInfo(**{**fields, **changes})


def make_summary(**changes: object) -> ModelSummary:
    return make_info(**changes).model


def reference_moe(model: MiniModel, request: MoeRequest) -> np.ndarray:
    """The whole layer of a bf16 model in float64, expert by expert."""
    hidden = bf16_to_f32(request.hidden).astype(np.float64)
    total = np.zeros_like(hidden)
    for row in range(len(hidden)):
        for expert_id, weight in zip(
            request.topk_ids[row], request.topk_weights[row], strict=True
        ):
            gate, up, down = model.bf16_weights(request.layer_idx, int(expert_id))
            gated = gate @ hidden[row]
            inner = gated / (1 + np.exp(-gated)) * (up @ hidden[row])
            total[row] += weight * (down @ inner)
    return total
