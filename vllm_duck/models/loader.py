"""Fills the host's modules from a checkpoint: only the tensors that they name.

Registered with vLLM as the load format "duck". Tensors in e4m3 are multiplied by
their 128x128 block scales once, here, since CPUs without AMX have no fp8 GEMM.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.weights.checkpoint import Checkpoint

logger = init_logger(__name__)

BLOCK = 128


class DuckModelLoader(BaseModelLoader):
    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: `hooks` resolved the model to a local directory."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill every view of `model.checkpoint_views()`.

        Raises:
            DuckCheckpointError: a tensor is missing, or has the wrong shape or dtype.
        """
        load_views(Path(model_config.model), dict(model.checkpoint_views()))
        model.finish_loading()


def load_views(model_dir: Path, views: dict[str, Tensor]) -> None:
    """Copy each named tensor of the checkpoint into its view, dequantised."""
    num_bytes = 0
    with ExitStack() as files:
        reader = _Reader(Checkpoint(model_dir), files)
        for name in tqdm(
            views, desc="Host weights", unit="tensor", leave=False, disable=None
        ):
            num_bytes += _fill(name, views[name], reader)
    logger.info(
        "Host read %d tensors, %.1f MB; the routed experts stay with the ducks",
        len(views),
        num_bytes / 1e6,
    )


class _Reader:
    """Reads tensors by name; each file is opened once."""

    def __init__(self, checkpoint: Checkpoint, files: ExitStack) -> None:
        self.checkpoint = checkpoint
        self.files = files
        self.opened: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        path = self.checkpoint.file_of(name)
        try:
            if path not in self.opened:
                self.opened[path] = self.files.enter_context(
                    safe_open(path, framework="pt")
                )
            tensor: Tensor = self.opened[path].get_tensor(name)
        except SafetensorError as error:
            raise DuckCheckpointError(
                f"{path} must hold the tensor {name}, got: {error}; "
                f"fetch that file again"
            ) from error
        return tensor


def _fill(name: str, view: Tensor, reader: _Reader) -> int:
    """Fill one view; returns the bytes read."""
    tensor = reader.read(name)
    if tensor.shape != view.shape:
        raise DuckCheckpointError(
            f"{name} must have shape {tuple(view.shape)} by config.json, "
            f"got {tuple(tensor.shape)}"
        )
    num_bytes = tensor.nbytes
    if view.dtype == torch.float8_e4m3fn:
        # The backend keeps codes, and names their scales by themselves.
        if tensor.dtype != view.dtype:
            raise DuckCheckpointError(f"{name} must be e4m3, got {tensor.dtype}")
    elif tensor.dtype == torch.float8_e4m3fn:
        scale = reader.read(f"{name}_scale_inv")
        num_bytes += scale.nbytes
        tensor = dequantize(name, tensor, scale)
    elif tensor.dtype not in (torch.bfloat16, torch.float32):
        raise DuckCheckpointError(
            f"{name} must be e4m3, bf16 or fp32, got {tensor.dtype}"
        )
    view.copy_(tensor)
    return num_bytes


def dequantize(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] e4m3 times scale [ceil(out/128), ceil(in/128)] fp32 -> fp32."""
    expected = tuple(-(-size // BLOCK) for size in weight.shape)
    if tuple(scale.shape) != expected:
        raise DuckCheckpointError(
            f"{name}_scale_inv must have shape {expected}, one scale per "
            f"{BLOCK}x{BLOCK} block, got {tuple(scale.shape)}"
        )
    rows = scale.float().repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
