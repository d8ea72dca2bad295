"""The one progress bar: bytes, bytes per second, from any thread, on terminals only."""

import threading

from tqdm import tqdm


class ByteProgress:
    """A bar on stderr while its `with` block lasts."""

    def __init__(
        self, what: str, *, total_bytes: int, done_bytes: int = 0, is_shown: bool = True
    ) -> None:
        self._lock = threading.Lock()
        self._bar = tqdm(
            desc=what,
            total=total_bytes,
            initial=done_bytes,
            unit="B",
            unit_scale=True,
            # None: only on a terminal.
            disable=None if is_shown else True,
        )

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._bar.update(num_bytes)

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()
