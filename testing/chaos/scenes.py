"""What happens once, around ducks without an engine or an engine of its own.

Each scene takes the model and an empty folder; it returns None when it held, else one
sentence.
"""

import filecmp
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from testing.chaos.one_host import sums
from testing.vllm_server import free_ports
from testing.waiting import wait_until
from vllm_duck.executor.serve.local import LocalDucks

Scene: TypeAlias = Callable[[Path, Path], str | None]

NUM_HOSTS = 10
_SEED = 4


def host_is_killed(model_dir: Path, folder: Path) -> str | None:
    """Hosts die in the middle of calls; their ducks serve the next one, and lose
    neither connections nor memory."""
    listen = [f"unix:{folder}/{index}" for index in range(2)]
    with LocalDucks.start(model_dir, num_threads=1, listen=listen) as ducks:
        expected = sums(model_dir, listen)
        # With what these calls opened.
        before = [_num_files(pid) for pid in ducks.pids]
        rng = random.Random(_SEED)
        for _ in range(NUM_HOSTS):
            host = _one_host("calls", model_dir, listen)
            assert host.stdout is not None
            assert host.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.3))
            host.kill()
            host.communicate()
        if ducks.dead():
            return ducks.dead()
        if not np.array_equal(sums(model_dir, listen), expected):
            return "another sum after the hosts' death"
        for pid, most in zip(ducks.pids, before, strict=True):
            wait_until(partial(_has_at_most, pid, most))
    return None


def disk_is_full_while_splitting(model_dir: Path, folder: Path) -> str | None:
    """`split` ends with one sentence, and the same command continues it."""
    undisturbed, disk = folder / "undisturbed", folder / "disk"
    _split(model_dir, undisturbed)
    size = sum(f.stat().st_size for f in undisturbed.rglob("*") if f.is_file())
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={2 * size}", "tmpfs"]
    if subprocess.run([*mount, disk], capture_output=True).returncode:
        print("no file system of its own without root: scene left out", flush=True)
        return None
    try:
        return _split_on(disk, model_dir, undisturbed)
    finally:
        subprocess.run(["umount", disk], check=True)


def _split_on(disk: Path, model_dir: Path, undisturbed: Path) -> str | None:
    out, filler = disk / "out", disk / "filler"
    process = _begin_split(model_dir, out)
    wait_until(lambda: list(out.glob("*/layer-*")) or process.poll() is not None)
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"\0" * 4096)
            file.flush()
    said = process.communicate()[1].strip().splitlines()
    if process.returncode == 0:
        return "the disk was full too late"
    if "No space left" not in said[-1] or any("Traceback" in line for line in said):
        return f"a full disk is told as {said}"
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    process = _begin_split(model_dir, out)
    said = process.communicate()[1].strip().splitlines()
    if process.returncode == 0 or any("Traceback" in line for line in said):
        return f"a read-only disk is told as {said}"
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    _split(model_dir, out)
    for path in undisturbed.rglob("*"):
        other = out / path.relative_to(undisturbed)
        if path.is_file() and not filecmp.cmp(path, other, shallow=False):
            return f"{other.name} differs from that of an undisturbed split"
    return None


def temporary_directories_are_full(model_dir: Path, folder: Path) -> str | None:
    """/tmp and /dev/shm fill up while a host runs: it goes on with the same tokens."""
    if Path(__file__).is_relative_to("/tmp"):
        print("this checkout is in /tmp, which is another one there: left out")
        return None
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    mount = "mount -t tmpfs -o size=8m tmpfs"
    own = f'{mount} /tmp && {mount} /dev/shm && exec "$@"'
    inside = ("unshare", "--mount", "sh", "-c", own, "sh")
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        print("no mounts of its own without root: scene left out", flush=True)
        return None
    with LocalDucks.start(model_dir, num_threads=1, listen=endpoints):
        calm = _tokens(_one_host("tokens", model_dir, endpoints))
        full = _tokens(_one_host("tokens_without_room", model_dir, endpoints, inside))
    return None if full == calm else f"{full} with full directories, else {calm}"


def _one_host(
    what: str, model_dir: Path, endpoints: Sequence[str], inside: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "testing.chaos.one_host"]
        + [what, str(model_dir), ",".join(endpoints)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _tokens(host: subprocess.Popen[str]) -> str:
    """The last line."""
    stdout, stderr = host.communicate()
    assert host.returncode == 0, stderr
    return stdout.splitlines()[-1]


def _begin_split(model_dir: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_duck.cli", "split", str(model_dir), str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _split(model_dir: Path, out: Path) -> None:
    process = _begin_split(model_dir, out)
    said = process.communicate()[1]
    assert process.returncode == 0, said


def _has_at_most(pid: int, num_files: int) -> bool:
    return _num_files(pid) <= num_files


def _num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        host_is_killed,
        disk_is_full_while_splitting,
        temporary_directories_are_full,
    )
}
