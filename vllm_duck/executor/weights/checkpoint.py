"""A checkpoint on disk, seen without torch: config, tensor index, file headers."""

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.duck import ModelSummary
from vllm_duck.executor.weights.fingerprint import fingerprint_of
from vllm_duck.executor.weights.headers import TensorPlace, read_header
from vllm_duck.families import family_of
from vllm_duck.family import ModelFamily, size_problem

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Marks a directory that is not a checkpoint but one duck's part of one.
SPLIT_MANIFEST_FILE = "manifest.json"


class Checkpoint:
    """One model directory: a single model.safetensors, or files with an index.

    Raises:
        DuckCheckpointError: config or index are missing or not what they must be.
    """

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        self.model_dir = Path(model_dir)
        self.config = _read_json(self.model_dir / "config.json")
        self._headers: dict[Path, dict[str, TensorPlace]] = {}
        self._file_names = self._read_index()

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._file_names)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of what the model is, for comparing it across machines.

        Raises:
            DuckCheckpointError: a file is missing or truncated.
        """
        return fingerprint_of(self.config, self.tensor_names, self.place_of)

    @cached_property
    def family(self) -> ModelFamily:
        """The family that `architectures` in config.json names.

        Raises:
            DuckCheckpointError: duck serves no such architecture.
        """
        try:
            return family_of(self.config.get("architectures"))
        except DuckConfigError as error:
            raise DuckCheckpointError(
                f"{self.model_dir / 'config.json'}: architectures: {error}"
            ) from error

    @property
    def hidden_size(self) -> int:
        return self._config_int("hidden_size")

    @property
    def moe_intermediate_size(self) -> int:
        return self._config_int("moe_intermediate_size")

    @property
    def n_routed_experts(self) -> int:
        return self._config_int("n_routed_experts")

    @cached_property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """Layers with routed experts by config: of the target, and of the MTP layers
        that the checkpoint holds."""
        num_layers = self._config_int("num_hidden_layers")
        num_mtp = self._config_int("num_nextn_predict_layers", least=0, default=0)
        return tuple(
            layer_idx
            for layer_idx in range(num_layers + num_mtp)
            if self.family.is_moe_layer(self._config_int, layer_idx)
            and (layer_idx < num_layers or self._holds_layer(layer_idx))
        )

    def _holds_layer(self, layer_idx: int) -> bool:
        prefix = f"{self.family.tensors.layer(layer_idx)}."
        return any(name.startswith(prefix) for name in self._file_names)

    @cached_property
    def weight_format(self) -> str:
        """How the experts are stored: "e4m3-block128" or "bf16".

        Raises:
            DuckCheckpointError: they are stored in another way.
        """
        quantization = self.config.get("quantization_config")
        if quantization is None:
            return "bf16"
        if not isinstance(quantization, Mapping):
            quantization = {}
        method = quantization.get("quant_method")
        block_shape = quantization.get("weight_block_size")
        if method != "fp8" or block_shape != [128, 128]:
            raise DuckCheckpointError(
                f"{self.model_dir}: experts must be bf16, or fp8 with "
                "weight_block_size [128, 128]; quantization_config says "
                f"{method} with {block_shape}"
            )
        return "e4m3-block128"

    @property
    def summary(self) -> ModelSummary:
        return ModelSummary(
            fingerprint=self.fingerprint,
            layer_ids=self.moe_layer_ids,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            n_routed_experts=self.n_routed_experts,
            weight_format=self.weight_format,
        )

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            DuckCheckpointError: the checkpoint does not list it.
        """
        file_name = self._file_names.get(name)
        if file_name is None:
            raise DuckCheckpointError(
                f"{self.model_dir} does not list the tensor {name}; "
                "the checkpoint is incomplete, or config.json is of another model"
            )
        return self.model_dir / file_name

    def place_of(self, name: str) -> TensorPlace:
        """Where a tensor's bytes are.

        Raises:
            DuckCheckpointError: it is missing, or its file is missing or truncated.
        """
        path = self.file_of(name)
        place = self._header_of(path).get(name)
        if place is None:
            raise DuckCheckpointError(
                f"{path} must hold the tensor {name} by {INDEX_FILE}, and does not; "
                "fetch that file again"
            )
        return place

    def _header_of(self, path: Path) -> dict[str, TensorPlace]:
        header = self._headers.get(path)
        if header is None:
            header = self._headers[path] = read_header(path)
        return header

    def _read_index(self) -> dict[str, str]:
        index_path = self.model_dir / INDEX_FILE
        if index_path.exists():
            weight_map = _read_json(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise DuckCheckpointError(f"{index_path} must have a weight_map")
            return weight_map
        single_path = self.model_dir / SINGLE_FILE
        if (self.model_dir / SPLIT_MANIFEST_FILE).exists():
            raise DuckCheckpointError(
                f"{self.model_dir} must hold a whole model, and it is one duck's "
                f"split: start it with `vllm-duck serve {self.model_dir}`"
            )
        if not single_path.exists():
            raise DuckCheckpointError(
                f"{self.model_dir} must hold {INDEX_FILE} or {SINGLE_FILE}, "
                "and holds neither"
            )
        return dict.fromkeys(self._header_of(single_path), SINGLE_FILE)

    def _config_int(
        self, key: str, *, least: int = 1, default: int | None = None
    ) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        expected = size_problem(key, value, least)
        if expected:
            raise DuckCheckpointError(
                f"{self.model_dir / 'config.json'}: {key} must be {expected}, got "
                f"{value!r}; is it a {self.family.name} model?"
            )
        assert isinstance(value, int)
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise DuckCheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise DuckCheckpointError(f"{path} must be JSON: {error}") from error
    if not isinstance(content, dict):
        raise DuckCheckpointError(f"{path} must be a JSON object")
    return content
