"""Paced ducks of the native stream, each on an address of its own, in one thread.

The server's side of the stream is the package's own, with a timer in place of a kernel
(ducks.cpp). They have the last cpu; the host should have the others.
"""

import argparse
import ctypes
import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks.common import end_with_parent, running
from testing import compiled
from vllm_duck.executor.duck import PROTOCOL_VERSION, DuckInfo, Shard
from vllm_duck.executor.native.listeners import open_listeners
from vllm_duck.executor.system.cpus import set_thread_cpus, thread_cpus
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.wire.codec import encode_info
from vllm_duck.executor.wire.identity import identity_of

HIDDEN_SIZE, NUM_COLUMNS, NUM_EXPERTS, NUM_LAYERS = 7168, 2048, 256, 58
PORT = 7100
_PACE = struct.Struct("ddd")
_SOURCES = (
    "base/block.cpp",
    "base/crc32c.cpp",
    "base/huge_pages.cpp",
    "stream/connection.cpp",
    "stream/connection_io.cpp",
    "stream/endpoint.cpp",
    "stream/payload.cpp",
    "stream/proto.cpp",
    "stream/send_queue.cpp",
    "stream/server/peer.cpp",
    "stream/status.cpp",
)


@dataclass(frozen=True)
class Pace:
    """Seconds of a call: the larger of the first two, and the third for each row."""

    # To read the experts of one row; more rows have more distinct ones.
    row_s: float
    # Of a row's arithmetic.
    flops_s: float = 0.0
    # Of a row's way there and back, which the links' bursts hide.
    wire_s: float = 0.0


@dataclass(frozen=True)
class PacedDucks:
    """Where they listen; their pace; the CPU time they have used."""

    endpoints: tuple[str, ...]
    _directory: Path

    def set_pace(self, pace: Pace) -> None:
        with (self._directory / "pace").open("r+b") as file:
            file.write(_PACE.pack(*astuple(pace)))

    def cpu_s(self) -> float:
        stat = Path(f"/proc/{(self._directory / 'pid').read_text()}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def compiled_ducks() -> Iterator[Path]:
    """The library that `paced_ducks` runs; needs nghttp2's headers."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as directory:
        library = Path(directory, "ducks.so")
        sources = [str(compiled.CSRC / name) for name in _SOURCES]
        link = ("-Wl,--no-as-needed", "-lnghttp2")
        source = Path(__file__).with_name("ducks.cpp")
        compiled.build(source, library, *sources, *link)
        yield library


@contextmanager
def paced_ducks(
    library: Path, addresses: Sequence[str], prefix: Sequence[str] = ()
) -> Iterator[PacedDucks]:
    """Run one on each address; `prefix` is a command to run them under."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as directory:
        Path(directory, "pace").write_bytes(_PACE.pack(*astuple(Pace(0.0))))
        module = [sys.executable, "-m", "benchmarks.fleet.ducks"]
        with running([*prefix, *module, str(library), directory, *addresses]):
            endpoints = tuple(f"{address}:{PORT}" for address in addresses)
            yield PacedDucks(endpoints, Path(directory))


def _serve(library: Path, directory: Path, addresses: Sequence[str]) -> None:
    """For the life of the process."""
    with (directory / "pace").open("r+b") as file:
        pace = ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), _PACE.size))
    ducks = ctypes.CDLL(str(library))
    ducks.pond_new.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(ducks.pond_new(ctypes.byref(pace)))
    plan = ShardPlan.even(
        len(addresses), num_columns=NUM_COLUMNS, num_experts=NUM_EXPERTS
    )
    for shard, address in zip(plan.shards, addresses, strict=True):
        (listener,), _ = open_listeners(f"{address}:{PORT}")
        info = _info(shard)
        data = encode_info(info)
        ducks.pond_add(
            handle,
            listener.detach(),
            identity_of(info).encode(),
            data,
            ctypes.c_size_t(len(data)),
        )
    print("ready", flush=True)
    ducks.pond_serve(handle)


def _info(shard: Shard) -> DuckInfo:
    return DuckInfo(
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint="paced",
        layer_ids=tuple(range(NUM_LAYERS)),
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=NUM_COLUMNS,
        n_routed_experts=NUM_EXPERTS,
        weight_format="e4m3-block128",
        shard=shard,
        isa="timer",
        num_threads=1,
        weight_bytes=0,
        resident_bytes=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("addresses", nargs="+")
    args = parser.parse_args()
    end_with_parent()
    set_thread_cpus(sorted(thread_cpus())[-1:])
    (args.directory / "pid").write_text(str(os.getpid()))
    _serve(args.library, args.directory, args.addresses)


if __name__ == "__main__":
    main()
