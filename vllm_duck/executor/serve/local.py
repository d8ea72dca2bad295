"""Duck processes on this machine that live as long as this process, and no longer.

Each duck's stdin is a pipe that only this process writes to. When this process ends,
however it ends, the pipe closes and the duck stops itself.
"""

import select
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_duck.endpoints import UNIX_PREFIX, check_endpoint
from vllm_duck.errors import DuckTimeout, DuckUnavailable
from vllm_duck.executor.serve.keeper import Keeper
from vllm_duck.executor.split.format import split_directories
from vllm_duck.executor.system.cpus import allowed_cpus, within_quota
from vllm_duck.executor.system.process import clean_environment
from vllm_duck.executor.system.temporary import temporary_directory
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.plan import ShardPlan

# What a child that LocalDucks started says on its stdout, once.
READY = "ready"
FAILED_PREFIX = "failed: "

# Loading can take long: the real model has 20 GB a duck, perhaps from a slow disk.
DEFAULT_START_S = 3600.0
_STOP_GRACE_S = 10.0
# Of the directories that LocalDucks makes for sockets, and removes.
PRIVATE_PREFIX = "vllm-duck-sockets-"


@dataclass
class _Child:
    """A duck's process, or that of the one that took its place."""

    endpoint: str
    command: Sequence[str]
    process: subprocess.Popen[str]


class LocalDucks:
    """Running ducks; stop() ends them, and so does leaving the `with` block."""

    def __init__(self, children: Sequence[_Child], directory: Path | None) -> None:
        self._children = tuple(children)
        self._directory = directory
        self._keeper: Keeper | None = None

    @classmethod
    def start(
        cls,
        model_dir: str | Path,
        *,
        num_ducks: int = 2,
        num_threads: int | None = None,
        plan: ShardPlan | None = None,
        listen: Sequence[str] | None = None,
        cpus: Collection[int] | None = None,
        weight_format: str | None = None,
        serve_flags: Sequence[str] = (),
        start_s: float = DEFAULT_START_S,
    ) -> "LocalDucks":
        """Start the ducks and wait until all serve.

        model_dir: a checkpoint, or what `vllm-duck split` made of one; that has its own
            plan, and takes neither num_ducks nor plan.
        plan: instead of an even split between `num_ducks`.
        listen: one endpoint per duck, instead of sockets in a private directory.
        num_threads: of each duck's kernel; by default they share out the cpus, or what
            this process's cgroup may use of them.
        cpus: for the ducks; by default all that the container allows, although
            vLLM pins its worker, and children inherit that.
        weight_format: "int8" or "int4" to hold the experts in fewer bits.

        Raises:
            DuckConfigError, DuckCheckpointError: found before anything is started.
            DuckUnavailable: a duck ended while it started; says why.
            DuckTimeout: not all ducks serve after `start_s`.
        """
        sources = _sources(Path(model_dir), plan, num_ducks)
        cpus = cpus or allowed_cpus()
        num_threads = num_threads or max(1, within_quota(len(cpus)) // len(sources))
        with ExitStack() as undo:
            directory = None
            if listen is None:
                directory = temporary_directory(PRIVATE_PREFIX)
                undo.callback(shutil.rmtree, directory, ignore_errors=True)
                listen = _socket_endpoints(directory, len(sources))
            flags = [
                f"--threads={num_threads}",
                f"--cpus={','.join(map(str, sorted(cpus)))}",
                *serve_flags,
            ]
            if weight_format is not None:
                flags.append(f"--weight-format={weight_format}")
            children = []
            for endpoint, source in zip(listen, sources, strict=True):
                command = _command(source, endpoint, flags)
                child = _Child(endpoint, command, _spawn(command))
                undo.callback(_end, child)
                children.append(child)
            deadline_s = time.monotonic() + start_s
            for child in children:
                _wait_ready(child, deadline_s - time.monotonic(), start_s)
            undo.pop_all()
        return cls(children, directory)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(child.endpoint for child in self._children)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(child.process.pid for child in self._children)

    def dead(self) -> str | None:
        """One sentence about the first duck that has ended by itself, if any."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                return f"duck {child.endpoint} ended with {_describe_exit(code)}"
        return None

    def keep(self) -> None:
        """Start each duck again that ends by itself, until stop()."""
        self._keeper = Keeper(
            len(self._children),
            wait=lambda i: self._children[i].process.wait(),
            how=lambda i: _end_of(self._children[i]),
            start=lambda i: _replace(self._children[i]),
        )

    def ends(self) -> dict[str, str]:
        """How ducks that were kept have ended, for the last time, by endpoint."""
        ends = {} if self._keeper is None else self._keeper.ends
        return {self._children[i].endpoint: end for i, end in ends.items()}

    def stop(self) -> None:
        """End all ducks and wait for them."""
        if self._keeper is not None:
            self._keeper.begin_to_stop()
        for child in self._children:
            _ask_to_stop(child)
        for child in self._children:
            _end(child)
        if self._keeper is not None:
            self._keeper.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> "LocalDucks":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _sources(
    model_dir: Path, plan: ShardPlan | None, num_ducks: int
) -> list[list[str]]:
    """What `vllm-duck serve` is told of each duck's shard."""
    directories = split_directories(model_dir)
    if directories:
        return [[str(directory)] for directory in directories]
    plan = plan or _even_plan(Checkpoint(model_dir), num_ducks)
    return [
        [
            str(model_dir),
            f"--columns={shard.column_lo}:{shard.column_hi}",
            f"--experts={shard.expert_lo}:{shard.expert_hi}",
        ]
        for shard in plan.shards
    ]


def _even_plan(checkpoint: Checkpoint, num_ducks: int) -> ShardPlan:
    return ShardPlan.even(
        num_ducks,
        num_columns=checkpoint.moe_intermediate_size,
        num_experts=checkpoint.n_routed_experts,
    )


def _socket_endpoints(directory: Path, num_ducks: int) -> list[str]:
    return [
        check_endpoint(f"{UNIX_PREFIX}{directory}/{index}")
        for index in range(num_ducks)
    ]


def _command(
    source: Sequence[str], endpoint: str, flags: Sequence[str]
) -> Sequence[str]:
    return [
        # -P: nothing is imported from the directory that the user happens to be in.
        *(sys.executable, "-P", "-m", "vllm_duck.cli", "serve", *source),
        f"--listen={endpoint}",
        "--child",
        *flags,
    ]


def _spawn(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        # Ctrl-C in a terminal goes to this process, which then stops its ducks.
        start_new_session=True,
        text=True,
    )


def _end_of(child: _Child) -> str:
    """How one that has ended did so, and what it said of it."""
    end = f"duck {child.endpoint} ended with {_describe_exit(child.process.wait())}"
    stdout = child.process.stdout
    assert stdout is not None
    said = [] if stdout.closed else stdout.read().splitlines()
    reasons = [line.removeprefix(FAILED_PREFIX) for line in said if line != READY]
    return ": ".join([end, *reasons])


def _replace(child: _Child) -> None:
    for pipe in (child.process.stdin, child.process.stdout):
        assert pipe is not None
        pipe.close()
    child.process = _spawn(child.command)


def _wait_ready(child: _Child, left_s: float, start_s: float) -> None:
    stdout = child.process.stdout
    assert stdout is not None
    if not select.select([stdout], [], [], max(0.0, left_s))[0]:
        raise DuckTimeout(
            f"duck {child.endpoint} did not serve within start_s={start_s}; "
            "is it still loading from a slow disk?"
        )
    line = stdout.readline().strip()
    if line == READY:
        return
    reason = line.removeprefix(FAILED_PREFIX)
    if not line:
        reason = f"it ended with {_describe_exit(child.process.wait())}"
    raise DuckUnavailable(f"duck {child.endpoint} did not start: {reason}")


def _ask_to_stop(child: _Child) -> None:
    stdin = child.process.stdin
    assert stdin is not None
    stdin.close()


def _end(child: _Child) -> None:
    _ask_to_stop(child)
    try:
        child.process.wait(_STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait()
    stdout = child.process.stdout
    assert stdout is not None
    stdout.close()


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
