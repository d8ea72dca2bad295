"""Files that get their name only when they are whole and on the disk."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from vllm_duck.executor.split.format import FileRecord, LayerLayout
from vllm_duck.executor.system.optional_calls import sync
from vllm_duck.executor.weights.checksums import FileDigest


class LayerFile:
    """A layer's file of one duck while it grows, under another name."""

    def __init__(self, directory: Path, layout: LayerLayout) -> None:
        self.layout = layout
        self._path = directory / layout.file_name
        self._file = _partial(self._path).open("wb")
        self._digest = FileDigest()
        self._num_bytes = 0

    def __enter__(self) -> "LayerFile":
        self.append(self.layout.header)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def has_expert(self, expert_id: int) -> bool:
        shard = self.layout.shard
        return shard.expert_lo <= expert_id < shard.expert_hi

    def append(self, part: bytes | memoryview) -> int:
        num_bytes = memoryview(part).nbytes
        self._file.write(part)
        self._digest.update(part)
        self._num_bytes += num_bytes
        return num_bytes

    def finish(self) -> FileRecord:
        assert self._num_bytes == self.layout.num_bytes
        _finish_file(self._file, self._path)
        return FileRecord(self._path.name, self._num_bytes, **self._digest.record())


def are_whole(directory: Path, files: Iterable[FileRecord]) -> bool:
    return all(
        (directory / file.name).is_file()
        and (directory / file.name).stat().st_size == file.num_bytes
        for file in files
    )


def write_whole(path: Path, content: bytes) -> None:
    with _partial(path).open("wb") as file:
        file.write(content)
        _finish_file(file, path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _finish_file(file: BinaryIO, path: Path) -> None:
    """Give a file its name once its bytes are on the disk."""
    file.flush()
    sync(file.fileno())
    _partial(path).rename(path)
    directory_fd = os.open(path.parent, os.O_RDONLY)
    try:
        sync(directory_fd)
    finally:
        os.close(directory_fd)
