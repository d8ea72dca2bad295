"""How fast a duck loads its split directory, and the memory it then takes.

The files have the shape of one of 32 ducks of DeepSeek-V3.2 (64 columns of 7168-wide
experts) with fewer layers and random weights. The peer is one thread that reads the
same files front to back; both sides take turns in the same run. "cold" means that this
system's page cache was dropped before (the disk may have a cache of its own), "cached"
that all was in it: then checksum and packing are what takes the time.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import Result, main
from vllm_duck.executor.duck import ModelSummary
from vllm_duck.executor.split.format import LayerLayout, Manifest, config_record
from vllm_duck.executor.split.loader import SplitDirectory
from vllm_duck.executor.split.whole_files import LayerFile, write_whole
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.weights.plan import ShardPlan

HIDDEN_SIZE = 7168
NUM_COLUMNS = 64
NUM_EXPERTS = 64
_READ_BYTES = 8 * 2**20


def run(quick: bool) -> Iterator[Result]:
    num_layers, num_rounds = (4, 2) if quick else (16, 5)
    with tempfile.TemporaryDirectory(prefix="vllm-duck-load-") as name:
        directory = Path(name)
        make_split(directory, num_layers)
        yield from _speed(directory, num_rounds)
        yield from _memory(directory)


def make_split(directory: Path, num_layers: int) -> None:
    """Write a split directory for one duck, with random finite weights."""
    model = ModelSummary(
        fingerprint="random",
        layer_ids=tuple(range(num_layers)),
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=NUM_COLUMNS,
        n_routed_experts=NUM_EXPERTS,
        weight_format="e4m3-block128",
    )
    plan = ShardPlan.even(1, num_columns=NUM_COLUMNS, num_experts=NUM_EXPERTS)
    rng = np.random.default_rng(0)
    config = config_record(b"{}")
    write_whole(directory / config.name, b"{}")
    records = [config]
    for layer_idx in model.layer_ids:
        layout = LayerLayout(model, plan.shards[0], layer_idx)
        expert = _random_expert(layout, rng)
        with LayerFile(directory, layout) as file:
            for _ in range(NUM_EXPERTS):
                file.append(expert)
            records.append(file.finish())
    manifest = Manifest(model=model, plan=plan, index=0, files=tuple(records))
    write_whole(directory / "manifest.json", manifest.to_json().encode())


def _random_expert(layout: LayerLayout, rng: np.random.Generator) -> bytes:
    # 0x7f is the one NaN of e4m3.
    codes = rng.integers(0, 0x7E, layout.expert_bytes, dtype=np.uint8)
    for part in layout.parts:
        if part.tensor.key.endswith("_scale"):
            codes[part.begin : part.end].view(np.float32)[:] = 0.01
    return codes.tobytes()


def _speed(directory: Path, num_rounds: int) -> Iterator[Result]:
    files = sorted(directory.glob("layer-*"))
    num_bytes = sum(file.stat().st_size for file in files)

    def read() -> None:
        buffer = bytearray(_READ_BYTES)
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def load() -> None:
        SplitDirectory(directory).load(show_progress=False)

    for case, prepare in (("cold", lambda: _drop_cache(files)), ("cached", read)):
        seconds: dict[Callable[[], None], list[float]] = {read: [], load: []}
        for _ in range(num_rounds):
            for side in (read, load):
                prepare()
                start_s = time.perf_counter()
                side()
                seconds[side].append(time.perf_counter() - start_s)
        yield Result(
            case=f"{case}, {num_bytes / 1e9:.1f} GB",
            metric="load_rate",
            value=num_bytes / 1e9 / median(seconds[load]),
            unit="GB/s",
            peer="one sequential reader",
            peer_value=num_bytes / 1e9 / median(seconds[read]),
            target=">= 0.8 of the disk" if case == "cold" else "",
        )


def _memory(directory: Path) -> Iterator[Result]:
    # In a process of its own: this one's allocator has a past.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        base, loaded, weights = pool.submit(_load_and_weigh, directory).result()
    case = f"{weights / 1e9:.1f} GB slice"
    per_slice = (loaded - base) / weights
    yield Result(case, "resident_per_slice", per_slice, "", target="<= 1.03")
    yield Result(case, "resident_base", base / 1e6, "MB")


def _load_and_weigh(directory: Path) -> tuple[int, int, int]:
    # What a serving duck imports besides.
    import vllm_duck.cli.serve  # noqa: F401

    base = resident_bytes()
    loaded = SplitDirectory(directory).load(show_progress=False)
    return base, resident_bytes(), loaded.weight_bytes


def _drop_cache(files: list[Path]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


if __name__ == "__main__":
    main("load", run, __doc__)
