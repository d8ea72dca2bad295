"""A duck process that is killed, and started again by who killed it."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence


class DuckProcess:
    """Serves once it exists.

    source: the model and which shard, as `vllm-duck serve` takes them.
    inside: what runs a command where the duck shall live.
    """

    def __init__(
        self,
        source: Sequence[str],
        listen: str,
        rng: random.Random,
        inside: Sequence[str] = (),
    ) -> None:
        self._rng = rng
        self._command = [
            *(*inside, sys.executable, "-P", "-m", "vllm_duck.cli", "serve", *source),
            *(f"--listen={listen}", "--threads=1", "--insecure"),
        ]
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill it, and start it again after up to two seconds."""
        self.stop()
        time.sleep(self._rng.uniform(0.0, 2.0))
        self._process = self._start()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the duck ended with {process.wait()}")
        # A full pipe would stop a duck that has much to say.
        self._reader = threading.Thread(target=process.stdout.read)
        self._reader.start()
        return process
