"""Where a safetensors file keeps its tensors, without reading them.

Invariant, pinned by tests: a tensor's place is checked against the file's length before
anything is read.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_duck.errors import DuckCheckpointError

# A header names the tensors of one file: 100 bytes each. More than this is garbage.
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor's bytes are."""

    name: str
    path: Path
    # As the file spells it: "F8_E4M3", "BF16", "F32", ...
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Read where a safetensors file keeps its tensors, and check that it can.

    Raises:
        DuckCheckpointError: the file is missing, no safetensors file, or truncated.
    """
    try:
        num_file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (num_header_bytes,) = struct.unpack("<Q", prefix)
            if num_header_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {num_header_bytes} bytes")
            header = json.loads(file.read(num_header_bytes))
            return {
                name: _place(path, name, entry, 8 + num_header_bytes, num_file_bytes)
                for name, entry in header.items()
                if name != "__metadata__"
            }
    except OSError as error:
        raise DuckCheckpointError(f"cannot read {path}: {error.strerror}") from error
    except DuckCheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DuckCheckpointError(
            f"{path} must be a safetensors file; its header does not parse: {error}; "
            "fetch that file again"
        ) from error


def _place(
    path: Path,
    name: str,
    entry: Mapping[str, Any],
    data_begin: int,
    num_file_bytes: int,
) -> TensorPlace:
    begin, end = (data_begin + int(offset) for offset in entry["data_offsets"])
    if end > num_file_bytes:
        raise DuckCheckpointError(
            f"{path} is truncated: the tensor {name} ends at byte {end}, the file at "
            f"{num_file_bytes}; fetch that file again"
        )
    shape = tuple(int(size) for size in entry["shape"])
    return TensorPlace(name, path, str(entry["dtype"]), shape, begin, end)
