"""Cuts a checkpoint into one directory for each duck.

Invariants, pinned by tests:
- every tensor is read once, whole, for all ducks together; at most _NUM_THREADS of
  them are in memory, each with a copy of one slice (to re-quantise takes whole experts
  in their place);
- a file gets its name when it is whole and on the disk, and a directory its manifest
  when all its files are;
- a rerun writes only the layers that the last one did not finish, and the result has
  the same bytes.
"""

import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.compute.kernel import BLOCK
from vllm_duck.executor.compute.requantize import requantize_expert
from vllm_duck.executor.duck import ModelSummary
from vllm_duck.executor.split.format import (
    CONFIG_FILE,
    FORMAT,
    MANIFEST_FILE,
    FileRecord,
    LayerLayout,
    Manifest,
    config_record,
)
from vllm_duck.executor.split.journal import JOURNAL_FILE, SplitJournal
from vllm_duck.executor.split.whole_files import LayerFile, are_whole, write_whole
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.expert_tensors import (
    ExpertTensor,
    allocate_layer,
    expert_tensors,
)
from vllm_duck.executor.weights.headers import TensorPlace
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.weights.progress import ByteProgress
from vllm_duck.executor.weights.tensor_reader import TensorReader

# Layers at a time: one reads while the other hashes and writes.
_NUM_THREADS = 2


@dataclass(frozen=True)
class SplitReport:
    """What a split did, and what it found done."""

    directories: tuple[Path, ...]
    num_bytes_written: int
    num_bytes_kept: int
    seconds: float


def split_checkpoint(
    checkpoint: Checkpoint,
    plan: ShardPlan,
    out_dir: Path,
    *,
    weight_format: str | None = None,
    show_progress: bool = True,
) -> SplitReport:
    """Write OUT/duck-0, OUT/duck-1, ..., each with what one shard of the plan owns.

    weight_format: "int8" or "int4" to write the experts in fewer bits.

    Every tensor is checked before the first is read, and so is the room on the disk.

    Raises:
        DuckConfigError: OUT holds another split, is being written, or is too small.
        DuckCheckpointError: a tensor is missing or not what it must be, or a file
            cannot be read or written.
        DuckShapeError: the kernel cannot use a shard's column range.
    """
    start_s = time.monotonic()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        model = checkpoint.summary.requantized(weight_format)
        writer = _Writer(checkpoint, model, plan, out_dir)
        kept, written = writer.run(show_progress)
    except OSError as error:
        raise DuckCheckpointError(
            f"the split into {out_dir} stopped: {error}; once that is mended, the same "
            "command continues it"
        ) from error
    return SplitReport(writer.directories, written, kept, time.monotonic() - start_s)


class _Writer:
    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ModelSummary,
        plan: ShardPlan,
        out_dir: Path,
    ) -> None:
        self._checkpoint = checkpoint
        # With the weight format that is written.
        self._model = model
        self._tensors = expert_tensors(checkpoint.summary)
        self._plan = plan
        self._out_dir = out_dir
        self._is_stopping = threading.Event()
        self.directories = tuple(
            out_dir / f"duck-{index}" for index in range(len(plan.shards))
        )

    def run(self, show_progress: bool) -> tuple[int, int]:
        """Split; returns the bytes that were there already, and those written."""
        self._check_tensors()
        total = self._data_bytes(self._layer_ids)
        if self._is_complete():
            return total, 0
        with SplitJournal(self._out_dir, self._identity()) as journal:
            kept = [idx for idx in self._layer_ids if self._is_kept(journal, idx)]
            kept_bytes = self._data_bytes(kept)
            self._check_room(total - kept_bytes)
            for directory in self.directories:
                directory.mkdir(exist_ok=True)
            with ByteProgress(
                f"Splitting into {len(self.directories)}",
                total_bytes=total,
                done_bytes=kept_bytes,
                is_shown=show_progress,
            ) as progress:
                self._write_layers(
                    [idx for idx in self._layer_ids if idx not in kept],
                    journal,
                    progress,
                )
            self._write_manifests(journal)
            journal.remove()
        return kept_bytes, total - kept_bytes

    @property
    def _layer_ids(self) -> tuple[int, ...]:
        return self._model.layer_ids

    def _layouts(self, layer_idx: int) -> list[LayerLayout]:
        return [
            LayerLayout(self._model, shard, layer_idx) for shard in self._plan.shards
        ]

    def _data_bytes(self, layer_ids: Iterable[int]) -> int:
        return sum(
            layout.data_bytes
            for layer_idx in layer_ids
            for layout in self._layouts(layer_idx)
        )

    def _identity(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "model": asdict(self._model),
            "plan": self._plan.to_json(),
        }

    def _check_tensors(self) -> None:
        for shard in self._plan.shards:
            allocate_layer(shard, self._model)
        for layer_idx in self._layer_ids:
            for expert_id in range(self._model.n_routed_experts):
                for tensor in self._tensors:
                    tensor.find(self._checkpoint, layer_idx, expert_id)

    def _is_complete(self) -> bool:
        """Whether OUT holds this split, finished; another one is an error."""
        found = list(self._out_dir.glob(f"duck-*/{MANIFEST_FILE}"))
        if not found or (self._out_dir / JOURNAL_FILE).exists():
            return False
        for path in found:
            manifest = Manifest.read(path.parent)
            if (manifest.model, manifest.plan) != (self._model, self._plan):
                raise DuckConfigError(
                    f"{path.parent} belongs to a split of another model, or with "
                    "another plan or weight format; name another directory, or "
                    "remove it"
                )
        return all(
            (directory / MANIFEST_FILE).exists()
            and are_whole(directory, Manifest.read(directory).files)
            for directory in self.directories
        )

    def _is_kept(self, journal: SplitJournal, layer_idx: int) -> bool:
        files = journal.finished.get(layer_idx)
        return files is not None and all(
            are_whole(directory, [file])
            for directory, file in zip(self.directories, files, strict=True)
        )

    def _check_room(self, num_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._out_dir).free
        if num_bytes > free_bytes:
            raise DuckConfigError(
                f"{self._out_dir} needs {num_bytes / 1e9:.1f} GB more and its disk has "
                f"{free_bytes / 1e9:.1f} GB free"
            )

    def _write_layers(
        self, layer_ids: list[int], journal: SplitJournal, progress: ByteProgress
    ) -> None:
        with (
            TensorReader() as reader,
            ThreadPoolExecutor(_NUM_THREADS, "duck-split") as pool,
        ):

            def write(layer_idx: int) -> list[FileRecord]:
                return self._write_layer(layer_idx, reader, progress)

            try:
                for layer_idx, files in zip(
                    layer_ids, pool.map(write, layer_ids), strict=True
                ):
                    journal.add(layer_idx, files)
            except BaseException:
                self._is_stopping.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _write_layer(
        self, layer_idx: int, reader: TensorReader, progress: ByteProgress
    ) -> list[FileRecord]:
        with ExitStack() as stack:
            files = [
                stack.enter_context(LayerFile(directory, layout))
                for directory, layout in zip(
                    self.directories, self._layouts(layer_idx), strict=True
                )
            ]
            for expert_id in range(self._model.n_routed_experts):
                owners = [file for file in files if file.has_expert(expert_id)]
                places = {
                    tensor: tensor.find(self._checkpoint, layer_idx, expert_id)
                    for tensor in self._tensors
                }
                for num_bytes in self._write_expert(reader, places, owners):
                    progress.add(num_bytes)
                    if self._is_stopping.is_set():
                        raise InterruptedError("another layer failed")
            return [file.finish() for file in files]

    def _write_expert(
        self,
        reader: TensorReader,
        places: dict[ExpertTensor, TensorPlace],
        owners: list[LayerFile],
    ) -> Iterator[int]:
        """Append one expert to its owners' files; yields the bytes of each write."""
        if self._model == self._checkpoint.summary:
            for tensor, place in places.items():
                yield _copy_tensor(reader, place, tensor, owners)
            return
        whole = {tensor: _read_whole(reader, place) for tensor, place in places.items()}
        for file in owners:
            made = requantize_expert(
                {tensor.key: _part(whole[tensor], tensor, file) for tensor in whole},
                column_offset=file.layout.shard.column_lo % BLOCK,
                weight_format=self._model.weight_format,
            )
            yield sum(
                file.append(made[part.tensor.key].data) for part in file.layout.parts
            )

    def _write_manifests(self, journal: SplitJournal) -> None:
        config = (self._checkpoint.model_dir / CONFIG_FILE).read_bytes()
        for index, directory in enumerate(self.directories):
            write_whole(directory / CONFIG_FILE, config)
            layers = [journal.finished[idx][index] for idx in self._layer_ids]
            manifest = Manifest(
                model=self._model,
                plan=self._plan,
                index=index,
                files=(config_record(config), *layers),
            )
            write_whole(directory / MANIFEST_FILE, manifest.to_json().encode())


def _copy_tensor(
    reader: TensorReader,
    place: TensorPlace,
    tensor: ExpertTensor,
    owners: list[LayerFile],
) -> int:
    """Give each owner its part. A function of its own: one tensor ends before the
    next is read."""
    whole = _read_whole(reader, place)
    return sum(file.append(_part(whole, tensor, file).data) for file in owners)


def _read_whole(reader: TensorReader, place: TensorPlace) -> np.ndarray:
    rows, columns = (slice(0, size) for size in place.shape)
    return reader.read(place, rows, columns)


def _part(whole: np.ndarray, tensor: ExpertTensor, file: LayerFile) -> np.ndarray:
    owned = tensor.owned(file.layout.shard)
    return np.ascontiguousarray(whole[owned.rows, owned.columns])
