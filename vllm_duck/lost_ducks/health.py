"""Whether an engine has its ducks: its worker says so, its API server asks.

A step that waits for a lost duck holds up the engine's process and all its messages, so
this goes from the worker to the server by a file. The file has its size from the start
and is written in place: a full disk does not keep the news back.
"""

import functools
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Any, Literal

_FILE_BYTES = 64 << 10
# CRC-32 and length of the JSON behind it.
_HEAD = struct.Struct("<II")
_MAX_READS = 100
# What others say of a duck can be long.
_MAX_TEXT = 1000


@dataclass(frozen=True)
class LostDuck:
    name: str
    # `time.time`.
    since_s: float
    reason: str


@dataclass(frozen=True)
class Health:
    """Of all ducks of an engine.

    recovering: a step waits for a duck.
    degraded: a step has failed for want of one, and the next ones would.
    """

    status: Literal["ok", "recovering", "degraded"] = "ok"
    # Why the step failed; names the duck.
    error: str = ""
    lost: tuple[LostDuck, ...] = ()

    @property
    def http_status(self) -> HTTPStatus:
        is_degraded = self.status == "degraded"
        return HTTPStatus.SERVICE_UNAVAILABLE if is_degraded else HTTPStatus.OK

    def answer(self) -> dict[str, Any]:
        """The body of /health, where it has one."""
        now_s = time.time()
        ducks = [
            {
                "duck": duck.name,
                "lost_s": round(max(0.0, now_s - duck.since_s), 1),
                "reason": duck.reason,
            }
            for duck in self.lost
        ]
        error = {"error": self.error} if self.error else {}
        return {"status": self.status, **error, "ducks": ducks}


class HealthFile:
    """Holds one Health. Whoever opened it keeps it, also when its path is gone."""

    def __init__(self, path: str) -> None:
        """Make the file, or open the one that is there.

        Raises:
            OSError: it cannot be had, or the disk is full.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._file, 0, _FILE_BYTES)

    def write(self, health: Health) -> None:
        """Of more ducks than there is room for, the first ones."""
        while len(body := _encoded(health)) > _FILE_BYTES - _HEAD.size:
            health = replace(health, lost=health.lost[:-1])
        head = _HEAD.pack(zlib.crc32(body), len(body))
        os.pwrite(self._file, head + body, 0)

    def read(self) -> Health:
        """What was written last; ok where nothing was.

        Raises:
            RuntimeError: the file is damaged.
        """
        for _ in range(_MAX_READS):
            content = os.pread(self._file, _FILE_BYTES, 0)
            checksum, size = _HEAD.unpack_from(content)
            body = content[_HEAD.size : _HEAD.size + size]
            if not size:
                return Health()
            # Another process may be writing just now.
            if zlib.crc32(body) == checksum:
                return _decoded(json.loads(body))
        raise RuntimeError("the file with the health of the ducks is damaged")


@functools.cache
def health_file(path: str) -> HealthFile:
    """The one of this process."""
    return HealthFile(path)


class HealthBoard:
    """The health as the worker knows it; each change goes to the file."""

    def __init__(self, file: HealthFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._error: str | None = None
        self._lost: dict[str, LostDuck] = {}

    @property
    def is_degraded(self) -> bool:
        return self._error is not None

    @property
    def lost_names(self) -> frozenset[str]:
        return frozenset(self._lost)

    def lost(self, name: str, reason: str) -> None:
        """A call waits for this duck."""
        with self._lock:
            self._note(name, reason)
            self._write()

    def back(self, name: str) -> None:
        with self._lock:
            self._lost.pop(name, None)
            self._write()

    def step_failed(self, error: str) -> None:
        with self._lock:
            self._error = error[:_MAX_TEXT]
            self._write()

    def looked(self, missing: Mapping[str, str]) -> None:
        """Every duck was asked: who does not answer, by name, and why."""
        with self._lock:
            if not missing:
                self._error = None
            for name in self._lost.keys() - missing.keys():
                del self._lost[name]
            for name, reason in missing.items():
                self._note(name, reason)
            self._write()

    def _note(self, name: str, reason: str) -> None:
        known = self._lost.get(name)
        since_s = time.time() if known is None else known.since_s
        self._lost[name] = LostDuck(name, since_s, reason[:_MAX_TEXT])

    def _write(self) -> None:
        status: Literal["ok", "recovering", "degraded"] = "ok"
        if self._error is not None:
            status = "degraded"
        elif self._lost:
            status = "recovering"
        lost = tuple(self._lost.values())
        self._file.write(Health(status, self._error or "", lost))


def _encoded(health: Health) -> bytes:
    return json.dumps(asdict(health)).encode()


def _decoded(fields: dict[str, Any]) -> Health:
    lost = tuple(LostDuck(**each) for each in fields.pop("lost"))
    return Health(**fields, lost=lost)
