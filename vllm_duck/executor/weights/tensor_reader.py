"""Reads rectangles of tensors out of safetensors files, and counts the bytes used."""

import os
import threading
from pathlib import Path

import numpy as np

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.weights.headers import TensorPlace

# All but F32 are kept as bits: numpy has no e4m3, bf16 or int4.
NUMPY_DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "BF16": np.dtype(np.uint16),
    "F32": np.dtype(np.float32),
}

_CHUNK_BYTES = 4 * 2**20


class TensorReader:
    """Keeps each file open once; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self.num_bytes_used = 0

    def read(self, place: TensorPlace, rows: slice, columns: slice) -> np.ndarray:
        """Read a rectangle of a 2-d tensor into a fresh array.

        Whole rows are one read of the file. A range of columns is cut out of whole
        rows, read a few megabytes at a time: their pieces are mostly smaller than a
        page, so a disk has to deliver all of it anyway.

        Raises:
            DuckCheckpointError: the file got shorter since its header was checked.
        """
        dtype = NUMPY_DTYPES[place.dtype]
        if (columns.start, columns.stop) == (0, place.shape[1]):
            tile = self._read_rows(place, rows, dtype)
        else:
            tile = self._cut_columns(place, rows, columns, dtype)
        with self._lock:
            self.num_bytes_used += tile.nbytes
        return tile

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_rows(
        self, place: TensorPlace, rows: slice, dtype: np.dtype
    ) -> np.ndarray:
        tile = np.empty((rows.stop - rows.start, place.shape[1]), dtype)
        offset = place.begin + rows.start * place.shape[1] * dtype.itemsize
        left = tile.data.cast("B")
        fd = self._fd_of(place.path)
        while left:
            num_read = os.preadv(fd, [left], offset)
            if num_read == 0:
                raise DuckCheckpointError(
                    f"{place.path} ended within the tensor {place.name}; "
                    "was it replaced while the duck loaded it?"
                )
            left = left[num_read:]
            offset += num_read
        return tile

    def _cut_columns(
        self, place: TensorPlace, rows: slice, columns: slice, dtype: np.dtype
    ) -> np.ndarray:
        num_columns = columns.stop - columns.start
        tile = np.empty((rows.stop - rows.start, num_columns), dtype)
        step = max(1, _CHUNK_BYTES // (place.shape[1] * dtype.itemsize))
        for first in range(rows.start, rows.stop, step):
            part = slice(first, min(first + step, rows.stop))
            to = slice(part.start - rows.start, part.stop - rows.start)
            tile[to] = self._read_rows(place, part, dtype)[:, columns]
        return tile

    def _fd_of(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]
