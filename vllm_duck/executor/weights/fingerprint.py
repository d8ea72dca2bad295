"""What a model is, in 32 hex digits, for comparing it across machines.

Covers config.json, the name, type and shape of tensors, and 4 KiB from the middle of
each of up to 1,024 of them, spread evenly over the sorted names: of the real model, 17
of each layer. Two trainings of one model differ in every tensor, so they differ here;
a copy in which somebody changed a few tensors may pass.

Invariants, pinned by tests:
- it is the same on every machine, and however the tensors are cut into files;
- it costs 1,024 reads of a page and the files' headers, whatever the model's size.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.weights.headers import TensorPlace

_MAX_TENSORS = 1024
_SAMPLE_BYTES = 4096

# Keys of config.json that tools rewrite without touching the model.
_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version"})


def fingerprint_of(
    config: Mapping[str, Any],
    tensor_names: Collection[str],
    place_of: Callable[[str], TensorPlace],
) -> str:
    """Read the samples and hash them.

    config: as in config.json.

    Raises:
        DuckCheckpointError: a file is missing or truncated.
    """
    names = sorted(tensor_names)
    places = [place_of(name) for name in _spread(names)]
    digest = hashlib.sha256(_text_of(config, names))
    samples = _read_samples(places)
    for place in places:
        digest.update(json.dumps([place.name, place.dtype, place.shape]).encode())
        digest.update(samples[place.name])
    return digest.hexdigest()[:32]


def _text_of(config: Mapping[str, Any], names: Sequence[str]) -> bytes:
    kept = {key: config[key] for key in config if key not in _VOLATILE_CONFIG_KEYS}
    return json.dumps([kept, names], sort_keys=True).encode()


def _spread(names: Sequence[str]) -> list[str]:
    count = min(len(names), _MAX_TENSORS)
    return [names[index * len(names) // count] for index in range(count)]


def _read_samples(places: Sequence[TensorPlace]) -> dict[str, bytes]:
    """By tensor name; read in the files' order, which a slow disk likes."""
    samples = {}
    for place in sorted(places, key=lambda place: (place.path, place.begin)):
        size = min(_SAMPLE_BYTES, place.end - place.begin)
        begin = place.begin + (place.end - place.begin - size) // 2
        try:
            with place.path.open("rb", buffering=0) as file:
                samples[place.name] = os.pread(file.fileno(), size, begin)
        except OSError as error:
            raise DuckCheckpointError(
                f"cannot read {place.path}: {error.strerror}"
            ) from error
    return samples
