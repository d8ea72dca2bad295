"""Directories that live as long as the process that made them, even if it is killed.

The owner holds a lock on its directory, which the system drops when the process ends,
however it ends. A directory without its lock is nobody's, and the next process that
makes one removes it. Where the file system has no locks, such a directory stays.
"""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from vllm_duck.executor.system.optional_calls import lock

# Younger ones may be about to be locked.
_MIN_AGE_S = 60.0
_LOST = "what a killed process leaves in the temporary directory is not removed"


def temporary_directory(prefix: str) -> Path:
    """Make a directory of this process, and remove what killed ones left of `prefix`.

    Its owner removes it, if it gets to.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_left(path)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    # Never closed: it is the lock.
    lock(os.open(path, os.O_RDONLY | os.O_CLOEXEC), lost=_LOST)
    return path


def _remove_if_left(path: Path) -> None:
    # Another user's, gone meanwhile, or locked by a process that lives.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if time.time() - os.fstat(descriptor).st_mtime < _MIN_AGE_S:
                return
            if lock(descriptor, lost=_LOST):
                shutil.rmtree(path)
        finally:
            os.close(descriptor)
