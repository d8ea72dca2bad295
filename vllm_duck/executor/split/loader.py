"""Loads a split directory into the kernel's weights, and verifies it on the way.

Each file is read once, front to back, an expert at a time: the bytes go through the
checksum and are packed straight from the read buffer. So loading needs, besides the
weights, one expert's slice for each thread.
"""

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from os import PathLike
from pathlib import Path

import numpy as np

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.compute.kernel import LayerWeights
from vllm_duck.executor.compute.requantize import load_expert
from vllm_duck.executor.duck import ModelSummary, Shard
from vllm_duck.executor.split.format import (
    CONFIG_FILE,
    LayerLayout,
    Manifest,
    config_record,
)
from vllm_duck.executor.weights.checksums import Crc32c
from vllm_duck.executor.weights.expert_tensors import allocate_layer
from vllm_duck.executor.weights.loader import LoadedShard, Place, leave_in_place
from vllm_duck.executor.weights.progress import ByteProgress
from vllm_duck.executor.weights.tensor_reader import NUMPY_DTYPES

# Files at a time: some wait for the disk while others hash and pack.
_NUM_LOAD_THREADS = 4


class SplitDirectory:
    """One duck's directory, as `vllm-duck split` writes it.

    Raises:
        DuckCheckpointError: the manifest or a file is missing, or not what it must be
            as far as its length says.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._directory = Path(directory)
        self._manifest = Manifest.read(self._directory)
        for layout in self._manifest.layouts():
            self._check_length(layout.file_name, layout.num_bytes)
        config = self._directory / CONFIG_FILE
        expected = self._manifest.record_of(CONFIG_FILE)
        self._check_length(CONFIG_FILE, expected.num_bytes)
        _check_digest(
            config, config_record(config.read_bytes()).crc32c, expected.crc32c
        )

    @property
    def summary(self) -> ModelSummary:
        return self._manifest.model

    @property
    def shard(self) -> Shard:
        return self._manifest.shard

    def load(
        self,
        *,
        weight_format: str | None = None,
        place: Place = leave_in_place,
        show_progress: bool = True,
    ) -> LoadedShard:
        """Read and verify all files.

        weight_format: "int8" or "int4" to hold the experts in fewer bits.
        place: MoeKernel.place of the kernel that will use them.

        Raises:
            DuckCheckpointError: names the file that is damaged.
            DuckConfigError: the split is re-quantised already, to another format.
        """
        start_s = time.monotonic()
        model = self.summary.requantized(weight_format)
        layouts = self._manifest.layouts()
        layers = {
            layout.layer_idx: allocate_layer(self.shard, model) for layout in layouts
        }
        for weights in layers.values():
            place(weights)
        num_bytes = sum(layout.num_bytes for layout in layouts)
        progress = ByteProgress(
            f"Loading {self.shard}", total_bytes=num_bytes, is_shown=show_progress
        )

        def load(layout: LayerLayout) -> None:
            self._load_layer(layout, layers[layout.layer_idx], progress)

        with progress, ThreadPoolExecutor(_NUM_LOAD_THREADS, "duck-load") as pool:
            try:
                for _ in pool.map(load, layouts):
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        seconds = time.monotonic() - start_s
        return LoadedShard(self.shard, model, layers, num_bytes, seconds)

    def _check_length(self, file_name: str, num_bytes: int) -> None:
        path = self._directory / file_name
        self._manifest.record_of(file_name)
        try:
            got = path.stat().st_size
        except OSError as error:
            raise DuckCheckpointError(
                f"cannot read {path}: {error.strerror}; copy it again"
            ) from error
        if got != num_bytes:
            raise DuckCheckpointError(
                f"{path} must have {num_bytes} bytes, got {got}; copy it again"
            )

    def _load_layer(
        self, layout: LayerLayout, weights: LayerWeights, progress: ByteProgress
    ) -> None:
        path = self._directory / layout.file_name
        # Not from the heap, which might keep it: its pages go back when it goes.
        buffer = memoryview(mmap.mmap(-1, max(len(layout.header), layout.expert_bytes)))
        expert = buffer[: layout.expert_bytes]
        problem = None
        digest = Crc32c()
        with FileIO(path) as file:
            _expect_sequential(file)
            header = buffer[: len(layout.header)]
            _fill(header, file, path)
            digest.update(header)
            if header != layout.header:
                problem = DuckCheckpointError(
                    f"{path} must hold layer {layout.layer_idx} of {layout.shard}, "
                    f"and is another file; copy it again"
                )
            progress.add(len(header))
            for expert_idx in range(layout.shard.num_experts):
                _fill(expert, file, path)
                digest.update(expert)
                if problem is None:
                    problem = _pack(weights, expert_idx, expert, layout)
                progress.add(len(expert))
        # First: damage on the way explains all other problems.
        expected = self._manifest.record_of(layout.file_name).crc32c
        _check_digest(path, digest.hexdigest(), expected)
        if problem is not None:
            raise DuckCheckpointError(f"{path}: {problem}")


def _pack(
    weights: LayerWeights, expert_idx: int, expert: memoryview, layout: LayerLayout
) -> DuckCheckpointError | None:
    arrays = {
        part.tensor.key: np.frombuffer(
            expert[part.begin : part.end], NUMPY_DTYPES[part.tensor.dtype]
        ).reshape(part.shape)
        for part in layout.parts
    }
    try:
        load_expert(weights, expert_idx, arrays)
    except DuckCheckpointError as error:
        return error
    return None


def _expect_sequential(file: FileIO) -> None:
    """Have the system read further ahead, while this thread hashes and packs.

    Asking for ranges ourselves (WILLNEED) was slower: 1.1 instead of 1.5 GB/s.
    """
    if hasattr(os, "posix_fadvise"):
        # A hint: a file system that takes none serves as well.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _fill(buffer: memoryview, file: FileIO, path: Path) -> None:
    while buffer:
        num_read = file.readinto(buffer)
        if not num_read:
            raise DuckCheckpointError(
                f"{path} ended before its {len(buffer)} last bytes; "
                "was it replaced while the duck loaded it?"
            )
        buffer = buffer[num_read:]


def _check_digest(path: Path, got: str, expected: str) -> None:
    if got != expected:
        raise DuckCheckpointError(
            f"{path} is damaged: its CRC-32C must be {expected} by the manifest, "
            f"got {got}; copy it again"
        )
