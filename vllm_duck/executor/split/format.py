"""The format of a split directory: what one duck holds of a model, as files.

    duck-1/
      config.json                  the model's, byte for byte
      layer-00003.safetensors      one file for each MoE layer
      manifest.json                written last: a directory without one is not whole

A layer's file holds its experts in order, and of each expert its tensors side by side,
cut to the shard. So an expert is one read. The data begin at a multiple of 4096 bytes,
as direct I/O wants it. The tensors' names are the format's own, whatever the checkpoint
calls them.

Invariant, pinned by a test: a file's name, header and length follow from model, shard
and layer alone.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.duck import ModelSummary, Shard
from vllm_duck.executor.weights.checkpoint import SPLIT_MANIFEST_FILE
from vllm_duck.executor.weights.checksums import FileDigest
from vllm_duck.executor.weights.expert_tensors import ExpertTensor, expert_tensors
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.weights.tensor_reader import NUMPY_DTYPES

MANIFEST_FILE = SPLIT_MANIFEST_FILE
CONFIG_FILE = "config.json"
FORMAT = "vllm_duck.split/2"
# Its fingerprint says nothing of the weights.
_OLD_FORMAT = "vllm_duck.split/1"

_ALIGNMENT = 4096


@dataclass(frozen=True)
class ExpertPart:
    """One tensor's slice within its expert's bytes."""

    tensor: ExpertTensor
    shape: tuple[int, int]
    begin: int
    end: int


@dataclass(frozen=True)
class LayerLayout:
    """Where everything lies in the file of one layer of one shard."""

    model: ModelSummary
    shard: Shard
    layer_idx: int

    @property
    def file_name(self) -> str:
        return f"layer-{self.layer_idx:05d}.safetensors"

    @cached_property
    def parts(self) -> tuple[ExpertPart, ...]:
        return tuple(_parts(self.model, self.shard))

    @property
    def expert_bytes(self) -> int:
        return self.parts[-1].end

    @property
    def data_bytes(self) -> int:
        """Bytes of all experts, without the header."""
        return self.shard.num_experts * self.expert_bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.data_bytes

    @cached_property
    def header(self) -> bytes:
        """Everything before the first expert."""
        entries: dict[str, Any] = {
            "__metadata__": {"format": FORMAT, "shard": str(self.shard)}
        }
        begin = 0
        for expert_id in range(self.shard.expert_lo, self.shard.expert_hi):
            for part in self.parts:
                entries[_name(part.tensor, self.layer_idx, expert_id)] = {
                    "dtype": part.tensor.dtype,
                    "shape": list(part.shape),
                    "data_offsets": [begin + part.begin, begin + part.end],
                }
            begin += self.expert_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        # The format allows spaces after the JSON.
        text = text.ljust(-(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class FileRecord:
    """One finished file."""

    name: str
    num_bytes: int
    sha256: str
    crc32c: str


@dataclass(frozen=True)
class Manifest:
    """What a split directory holds, and by which plan.

    Raises:
        DuckConfigError: the plan is of another model, or has no shard `index`.
    """

    model: ModelSummary
    plan: ShardPlan
    index: int
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        sizes = (self.model.moe_intermediate_size, self.model.n_routed_experts)
        plan_sizes = (self.plan.moe_intermediate_size, self.plan.n_routed_experts)
        if sizes != plan_sizes:
            raise DuckConfigError(
                f"the plan must be for {sizes} columns and experts, got {plan_sizes}"
            )
        if not 0 <= self.index < len(self.plan.shards):
            raise DuckConfigError(
                f"index must be in [0, {len(self.plan.shards)}), got {self.index}"
            )

    @property
    def shard(self) -> Shard:
        return self.plan.shards[self.index]

    def layouts(self) -> list[LayerLayout]:
        return [
            LayerLayout(self.model, self.shard, layer_idx)
            for layer_idx in self.model.layer_ids
        ]

    def record_of(self, file_name: str) -> FileRecord:
        """Look a file up.

        Raises:
            DuckCheckpointError: the manifest does not have it.
        """
        for record in self.files:
            if record.name == file_name:
                return record
        raise DuckCheckpointError(
            f"{MANIFEST_FILE} lacks {file_name}; split the model again"
        )

    def to_json(self) -> str:
        data = {
            "format": FORMAT,
            "index": self.index,
            "model": asdict(self.model),
            "plan": json.loads(self.plan.to_json()),
            "files": [asdict(record) for record in self.files],
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read a directory's manifest.

        Raises:
            DuckCheckpointError: it is missing, or not what it must be.
        """
        path = directory / MANIFEST_FILE
        try:
            data = json.loads(path.read_text())
            if data["format"] == _OLD_FORMAT:
                raise _old_split(path)
            if data["format"] != FORMAT:
                raise ValueError(f'format {data["format"]!r}, expected "{FORMAT}"')
            model = ModelSummary(**data["model"])
            return cls(
                model=_with_tuple(model),
                plan=ShardPlan.from_json(json.dumps(data["plan"])),
                index=int(data["index"]),
                files=tuple(FileRecord(**record) for record in data["files"]),
            )
        except OSError as error:
            raise DuckCheckpointError(f"cannot read {path}: {error.strerror}") from None
        except DuckCheckpointError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DuckCheckpointError(
                f"{path} must be the manifest of a split directory, and is damaged: "
                f"{error}; copy it again"
            ) from error


def _old_split(path: Path) -> DuckCheckpointError:
    return DuckCheckpointError(
        f"{path} must be of {FORMAT}, got {_OLD_FORMAT}, whose model fingerprint does "
        "not cover the weights; remove the directory and split the model again"
    )


def is_split_directory(directory: str | Path) -> bool:
    return (Path(directory) / MANIFEST_FILE).is_file()


def split_directories(parent: str | Path) -> list[Path]:
    """The ducks' directories in OUT of `vllm-duck split MODEL OUT`, in duck order.

    Empty where there is none.

    Raises:
        DuckCheckpointError: some are missing, damaged, or of another split.
    """
    paths = sorted(Path(parent).glob(f"duck-*/{MANIFEST_FILE}"))
    found = {path.parent: Manifest.read(path.parent) for path in paths}
    if not found:
        return []
    first = next(iter(found.values()))
    by_index = {manifest.index: path for path, manifest in found.items()}
    num_ducks = len(first.plan.shards)
    are_alike = all(
        (manifest.model, manifest.plan) == (first.model, first.plan)
        for manifest in found.values()
    )
    if not are_alike or len(found) != num_ducks or len(by_index) != num_ducks:
        raise DuckCheckpointError(
            f"{parent} must hold the {num_ducks} directories of one split, got "
            f"{', '.join(path.name for path in found)}; copy the others there, or "
            "serve each by itself"
        )
    return [by_index[index] for index in range(num_ducks)]


def config_record(content: bytes) -> FileRecord:
    digest = FileDigest()
    digest.update(content)
    return FileRecord(CONFIG_FILE, len(content), **digest.record())


def _name(tensor: ExpertTensor, layer_idx: int, expert_id: int) -> str:
    expert = f"model.layers.{layer_idx}.mlp.experts.{expert_id}"
    return f"{expert}.{tensor.projection}_proj.{tensor.suffix}"


def _parts(model: ModelSummary, shard: Shard) -> Iterator[ExpertPart]:
    begin = 0
    for tensor in expert_tensors(model):
        shape = tensor.owned(shard).shape
        end = begin + math.prod(shape) * NUMPY_DTYPES[tensor.dtype].itemsize
        yield ExpertPart(tensor, shape, begin, end)
        begin = end


def _with_tuple(model: ModelSummary) -> ModelSummary:
    # JSON has lists only, and the host compares summaries.
    return ModelSummary(**{**asdict(model), "layer_ids": tuple(model.layer_ids)})
