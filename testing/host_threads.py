"""The host's threads and instruction set, changed for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_duck.models.cpu import _host, threads


@contextmanager
def using(
    num_threads: int, isa: str = "", *, work_per_thread: int = threads.WORK_PER_THREAD
) -> Iterator[None]:
    """`threads.configure` for a while."""
    before = threads._current
    threads.configure(num_threads, isa, work_per_thread=work_per_thread)
    try:
        yield
    finally:
        threads._current = before


def isa() -> str:
    return _host.host_isa(threads.current())
