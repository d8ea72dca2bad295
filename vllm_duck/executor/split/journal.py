"""What a split has finished so far, so that a rerun continues where it stopped.

A journal is a file of JSON lines: first what is being split and how, then one line for
each layer whose files are whole and on the disk. A torn last line counts as none.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.split.format import FileRecord
from vllm_duck.executor.system.optional_calls import lock, sync

JOURNAL_FILE = "split-journal.jsonl"


class SplitJournal:
    """The journal of one output directory, held by one process at a time.

    Raises:
        DuckConfigError: another process splits into this directory, or an earlier
            split of another model or plan was not finished there.
    """

    def __init__(self, out_dir: Path, identity: dict[str, Any]) -> None:
        self._path = out_dir / JOURNAL_FILE
        self._file = self._path.open("a+b")
        try:
            self.finished = self._resume(out_dir, identity)
        except BaseException:
            self._file.close()
            raise

    def add(self, layer_idx: int, files: Sequence[FileRecord]) -> None:
        """Note that a layer's files are whole."""
        self._write({"layer": layer_idx, "files": [asdict(file) for file in files]})
        self.finished[layer_idx] = tuple(files)

    def remove(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "SplitJournal":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _resume(
        self, out_dir: Path, identity: dict[str, Any]
    ) -> dict[int, tuple[FileRecord, ...]]:
        try:
            lock(
                self._file.fileno(),
                lost="do not start a second split into the same directory",
            )
        except BlockingIOError:
            raise DuckConfigError(f"another split is writing into {out_dir}") from None
        self._file.seek(0)
        try:
            entries = _whole_lines(self._file.read())
        except ValueError as error:
            raise DuckConfigError(
                f"{self._path} is damaged: {error}; remove {out_dir} and split again"
            ) from error
        if not entries:
            self._file.truncate(0)
            self._write(identity)
            return {}
        # As JSON spells it: tuples are lists there.
        if entries[0] != json.loads(json.dumps(identity)):
            raise DuckConfigError(
                f"{out_dir} holds an unfinished split of another model, or with "
                "another plan or weight format; name another directory, or remove it"
            )
        self._file.truncate(sum(len(_line(entry)) for entry in entries))
        return {
            entry["layer"]: tuple(FileRecord(**file) for file in entry["files"])
            for entry in entries[1:]
        }

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(_line(entry))
        self._file.flush()
        sync(self._file.fileno())


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _whole_lines(content: bytes) -> list[dict[str, Any]]:
    whole, _, _ = content.rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
