"""Which cpus this process may use, and how many threads are worth starting there.

Three things limit it: the cpus of its affinity (cpuset, taskset); the time that its
cgroup may take of them (a container's `--cpus 1.5`); and the memory bandwidth that
decode is made of, to which the second hardware thread of a core adds nothing.
"""

import math
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

_ROOT = Path("/")


def thread_cpus() -> set[int]:
    """The cpus that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def set_thread_cpus(cpus: Collection[int]) -> None:
    """Move the calling thread, and the threads it will start, to these cpus.

    The system cuts the wish down to what the container allows.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def run_on_cpus(function: Callable[[], _T], cpus: Collection[int]) -> _T:
    """Run a function in a thread of its own, on these cpus.

    Threads inherit the affinity of the thread that starts them, so what the function
    starts runs on these cpus too, and the caller keeps its own affinity.
    """

    def run() -> _T:
        set_thread_cpus(cpus)
        return function()

    with ThreadPoolExecutor(1, "duck-cpus") as pool:
        return pool.submit(run).result()


def allowed_cpus() -> set[int]:
    """Every cpu that the container allows, also when the calling thread is pinned."""
    everything = range(os.cpu_count() or 1)
    return run_on_cpus(thread_cpus, everything)


def physical_cores() -> list[int]:
    """The calling thread's cpus, one for each core."""
    cores: dict[str, int] = {}
    for cpu in sorted(thread_cpus()):
        cores.setdefault(_siblings(cpu), cpu)
    return list(cores.values())


def describe_cpus(root: Path = _ROOT) -> str:
    """What there is and what of it may be used, for people."""
    facts = [f"{os.cpu_count()} cpus"]
    if len(thread_cpus()) != os.cpu_count():
        facts.append(f"{len(thread_cpus())} of them allowed")
    if (quota := cpu_quota(root)) is not None:
        facts.append(f"a quota of {quota:g}")
    num_threads = within_quota(len(physical_cores()), root)
    return f"{', '.join(facts)}: {num_threads} threads by default"


def numa_node(cpu: int) -> str:
    for path in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node*"):
        return path.name
    return "node0"


def within_quota(num_threads: int, root: Path = _ROOT) -> int:
    """As many of these threads as the cgroup's quota lets run all the time, or one.

    One thread more would make all of them stand still for the rest of each period.
    """
    quota = cpu_quota(root)
    return num_threads if quota is None else max(1, min(num_threads, math.floor(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cpus' worth of time that this process's cgroup may take; None: no limit.

    Each cgroup above limits it too. In a container the path that /proc names may be the
    host's, and what is mounted is the container's own.
    """
    quotas = [
        quota
        for group in _cgroups(root)
        if (quota := _quota_v2(group) or _quota_v1(group)) is not None
    ]
    return min(quotas, default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """The directories of this process's cgroups that may limit its time."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.strip("/")
        yield group
        yield from (above for above in group.parents if above.is_relative_to(mount))


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() else None


def _quota_v1(group: Path) -> float | None:
    quota = _read(group / "cpu.cfs_quota_us").strip()
    period = _read(group / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _siblings(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return _read(path) or f"cpu {cpu} alone"
