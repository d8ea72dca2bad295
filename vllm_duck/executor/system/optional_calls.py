"""Calls that some file systems do not have, and that nothing here needs to be correct.

Lustre and some NFS refuse flock, and FUSE or CIFS the fsync of a directory. Such a
refusal is warned of once, and the work goes on; every other error is an error.
"""

import errno
import fcntl
import logging
import os
from functools import cache

# EBADF: NFS wants a lock's file open for writing, which a directory cannot be.
_REFUSALS = frozenset(
    {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.EBADF}
)

logger = logging.getLogger(__name__)


def lock(descriptor: int, *, lost: str) -> bool:
    """Lock a file or directory for this process until the descriptor is closed.

    lost: for the warning: what is not noticed without the lock.

    Returns False where the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _require_refusal(error)
        _warn_once("flock", error.strerror, lost)
        return False
    return True


def sync(descriptor: int) -> None:
    """Have the system write a file or a directory to the disk now."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        _require_refusal(error)
        _warn_once(
            "fsync", error.strerror, "a power cut may undo what was written last"
        )


def _require_refusal(error: OSError) -> None:
    if error.errno not in _REFUSALS:
        raise error


@cache
def _warn_once(call: str, reason: str, lost: str) -> None:
    logger.warning(
        "the file system refuses %s (%s): going on without; %s", call, reason, lost
    )
