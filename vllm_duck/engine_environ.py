"""Environment variables that an engine with ducks sets for itself and its children."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

# vLLM's V1 runner is the one that duck derives from.
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# Seconds that vLLM waits for its processes to end: a duck gives its memory back, an
# interpreter with torch takes seconds to end. vLLM's 5 are too few on a busy machine.
STOP_VARIABLE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
STOP_S = "60"

_CHOICES = ((RUNNER_VARIABLE, "0"), (STOP_VARIABLE, STOP_S))
# Those that were not set until an engine with ducks needed them.
_chosen: set[str] = set()


def choose(environ: MutableMapping[str, str]) -> bool:
    """Set what the user has not; whether no engine with ducks did so before."""
    is_first = not _chosen
    for name, value in _CHOICES:
        if name not in environ:
            environ[name] = value
            _chosen.add(name)
    return is_first


def unset(environ: MutableMapping[str, str]) -> None:
    """Undo every `choose` of this process."""
    while _chosen:
        environ.pop(_chosen.pop(), None)


@contextmanager
def safe_path(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Keep the working directory off the path of what vLLM starts meanwhile.

    A `python -m` or `-c` would import a user's queue.py or signal.py, not Python's.
    """
    before = environ.get("PYTHONSAFEPATH")
    environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del environ["PYTHONSAFEPATH"]
        if before is not None:
            environ["PYTHONSAFEPATH"] = before
