"""Fills the host's modules from a checkpoint: only the tensors that they name.

Registered with vLLM as the load format "duck". Files are mapped, so what a backend
packs from there is in memory once.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.models.backend import Part
from vllm_duck.models.matrix import E4M3, Matrix, dequantize

logger = init_logger(__name__)

# By their names in the checkpoint.
Views = Mapping[str, Tensor | Matrix]


class HasParts(Protocol):
    """A model: what of it has weights, each with its name in the checkpoint."""

    def parts(self) -> Iterator[tuple[str, Part]]: ...


class DuckModelLoader(BaseModelLoader):
    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing: `hooks` resolved the model to a local directory."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill all that the model names, and have its parts pack it.

        Raises:
            DuckCheckpointError: a tensor is missing, or has the wrong shape or dtype.
        """
        start_s = time.monotonic()
        views = views_of(model)
        load_views(Path(model_config.model), views)
        num_bytes = _finish(model)
        logger.info(
            "Host read %d tensors, %.1f MB in %.1f s; the routed experts stay with the "
            "ducks",
            len(views),
            num_bytes / 1e6,
            time.monotonic() - start_s,
        )


def views_of(model: HasParts) -> Views:
    """All that a model wants of its checkpoint."""
    return {
        name: view
        for prefix, part in model.parts()
        for name, view in part.checkpoint_views(prefix)
    }


def load_views(model_dir: Path, views: Views) -> None:
    """Put each named tensor of the checkpoint where it belongs.

    Raises:
        DuckCheckpointError: it is missing, or has the wrong shape or dtype.
    """
    with ExitStack() as files:
        reader = _Reader(Checkpoint(model_dir), files)
        for name, view in views.items():
            _fill(name, view, reader)


def _finish(model: HasParts) -> int:
    """Have all parts pack what they were given; returns its bytes in the files."""
    parts = [
        (part, sum(_file_bytes(view) for _, view in part.checkpoint_views(name)))
        for name, part in model.parts()
    ]
    total = sum(num_bytes for _, num_bytes in parts)
    with tqdm(
        total=total,
        desc="Host weights",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None,
    ) as bar:
        for part, num_bytes in parts:
            part.finish_loading()
            bar.update(num_bytes)
    return total


def _file_bytes(view: Tensor | Matrix) -> int:
    if isinstance(view, Tensor):
        return view.nbytes
    return view.weight.nbytes + (0 if view.scale is None else view.scale.nbytes)


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


def _fill(name: str, view: Tensor | Matrix, reader: _Reader) -> None:
    tensor = reader.read(name)
    takes_codes = isinstance(view, Matrix) or view.dtype == E4M3
    is_coded = tensor.dtype == E4M3
    has_own_scales = isinstance(view, Tensor) and takes_codes
    scale = None
    if is_coded and not has_own_scales:
        scale = reader.read(f"{name}_scale_inv")
    if isinstance(view, Matrix):
        view.put(name, tensor, scale)
        return
    if tensor.shape != view.shape:
        raise DuckCheckpointError(
            f"{name} must have shape {tuple(view.shape)} by config.json, "
            f"got {tuple(tensor.shape)}"
        )
    if takes_codes and not is_coded:
        raise DuckCheckpointError(f"{name} must be e4m3, got {tensor.dtype}")
    if scale is not None:
        tensor = dequantize(name, tensor, scale)
    elif not takes_codes and tensor.dtype not in (torch.bfloat16, torch.float32):
        raise DuckCheckpointError(
            f"{name} must be e4m3, bf16 or fp32, got {tensor.dtype}"
        )
    view.copy_(tensor)
