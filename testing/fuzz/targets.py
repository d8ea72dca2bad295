"""What is fuzzed: how each reader is asked, and which errors are answers."""

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testing.ducks.mini_model import make_info, make_mini_model, make_request
from testing.fuzz.mutate import damaged, damaged_json
from testing.fuzz.sessions import client_target, server_targets
from vllm_duck.config import DuckConfig
from vllm_duck.endpoints import parse_endpoints
from vllm_duck.errors import DuckError
from vllm_duck.executor import _kernel
from vllm_duck.executor.split.format import MANIFEST_FILE, Manifest
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.headers import read_header
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.wire import codec
from vllm_duck.plan.sizes import read_sizes

TINY = Path(__file__).parents[2] / "models" / "tiny-v32"


@dataclass(frozen=True)
class Target:
    """A reader.

    seeds: sound inputs. take: raises DuckError for what it refuses; anything else that
        it raises is a finding. share: of a million cases.
    """

    name: str
    seeds: tuple[bytes, ...]
    take: Callable[[bytes], object]
    share: int
    is_json: bool = False

    def case(self, rng: random.Random) -> bytes:
        seed = rng.choice(self.seeds)
        if self.is_json and rng.random() < 0.7:
            return damaged_json(seed, rng)
        return damaged(seed, rng)


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    """Every one, with the files and servers that they need."""
    with ExitStack() as stack:
        # Where memory is the disk, a case costs microseconds.
        root = "/dev/shm" if Path("/dev/shm").is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root)))
        found = [*_wire(), *_files(folder), *_texts()]
        for name, seeds, take, share in (
            *stack.enter_context(server_targets()),
            stack.enter_context(client_target()),
        ):
            found.append(Target(name, seeds, take, share))
        yield found


def _wire() -> Iterator[Target]:
    request = make_request(3)
    messages = [
        codec.encode_request(request, request_id=7, reply_dtype=dtype)
        for dtype in ("bf16", "fp32")
    ]
    rows = np.zeros((3, 32), np.uint16)
    replies = [
        codec.encode_reply(rows, request_id=7, queue_us=1, compute_us=2),
        codec.encode_refusal(7, codec.ReplyStatus.INVALID_REQUEST, error="no"),
    ]
    yield Target("request", tuple(messages), _sealed(codec.decode_request), 230_000)
    yield Target("reply", tuple(replies), _sealed(codec.decode_reply), 200_000)
    info = codec.encode_info(make_info())
    yield Target("info", (info,), codec.decode_info, 100_000)


def _sealed(take: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """As it is, and with a checksum that is right, so that all of it is parsed."""

    def both(message: bytes) -> None:
        body = message[:-5]
        checksum = b"\x55" + _kernel.crc32c(body, 0).to_bytes(4, "little")
        for each in (message, body + checksum):
            try:
                take(each)
            except DuckError:
                continue

    return both


def _files(folder: Path) -> Iterator[Target]:
    model = make_mini_model("fp8").write(folder / "model")
    text = (model / "config.json").read_bytes()
    tiny = (TINY / "config.json").read_bytes()
    yield Target("config", (text,), _in(model, "config.json", _summary), 60_000, True)
    plan = ShardPlan.even(2, num_columns=160, num_experts=4)
    split_checkpoint(Checkpoint(model), plan, folder / "split")
    part = folder / "split" / "duck-0"
    manifest = (part / MANIFEST_FILE).read_bytes()
    yield Target(
        "manifest", (manifest,), _in(part, MANIFEST_FILE, Manifest.read), 60_000, True
    )
    sizes = folder / "sizes"
    sizes.mkdir()
    yield Target("sizes", (tiny,), _in(sizes, "config.json", read_sizes), 60_000, True)
    yield Target("header", (_header(),), _in_file(folder / "header"), 100_000)


def _summary(model_dir: Path) -> None:
    checkpoint = Checkpoint(model_dir)
    _ = checkpoint.summary


def _header() -> bytes:
    tensors = {
        f"layer.{i}": {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * i] * 2}
        for i in range(3)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(192)


def _in(folder: Path, name: str, read: Callable[[Path], object]) -> Any:
    """Puts the case in the place of a file of the folder, which is then read."""

    def take(case: bytes) -> None:
        (folder / name).write_bytes(case)
        read(folder)

    return take


def _in_file(path: Path) -> Callable[[bytes], object]:
    def take(case: bytes) -> None:
        path.write_bytes(case)
        read_header(path)

    return take


def _texts() -> Iterator[Target]:
    settings = {
        "endpoints": ["a:7100", ["b:1", "unix:/run/duck"]],
        "deadline_s": 30.0,
        "recover_s": 60,
        "reply_dtype": "bf16",
        "local_ducks": 2,
        "draft_gate": False,
        "tls_ca": None,
    }
    text = json.dumps(settings).encode()
    yield Target("settings", (text,), _read_settings, 100_000, True)
    plan = ShardPlan.even(3, num_columns=160, num_experts=4).to_json().encode()
    yield Target("plan", (plan,), _read_plan, 40_000, True)
    lines = (b"a:7100,b:7100|c:7100", b"unix:/run/duck,[::1]:7100")
    yield Target("endpoints", lines, lambda case: parse_endpoints(_text(case)), 30_000)


def _read_settings(case: bytes) -> None:
    try:
        settings = json.loads(case)
    except ValueError:
        # vLLM's to refuse.
        return
    DuckConfig.from_settings(settings, {})


def _read_plan(case: bytes) -> None:
    ShardPlan.from_json(_text(case))


def _text(case: bytes) -> str:
    return case.decode(errors="replace")
