"""`vllm serve` as a user runs it, for the time of a `with` block."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from testing.waiting import WAIT_S, wait_until
from vllm_duck.engine_environ import STOP_VARIABLE

BIN = Path(sys.executable).parent
MARK = "DUCK_TEST_MARK"


@dataclass
class Server:
    process: subprocess.Popen
    base_url: str
    mark: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.base_url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def interrupt(self) -> int:
        """What Ctrl-C in a terminal does; returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(WAIT_S)

    def assert_calm(self) -> None:
        """Nothing in the log would alarm a user who has stopped the server."""
        log = self.log.read_text()
        for alarm in ("force killing", "Traceback", "ERROR", "leaked"):
            assert alarm not in log, log[-3000:]

    def is_up(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(
                f"the server did not start:\n{self.log.read_text()[-5000:]}"
            )
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=WAIT_S):
                return True
        except OSError:
            return False

    def processes(self) -> dict[int, str]:
        """What came of it and lives, by pid: command lines.

        vLLM's titles overwrite the mark of its processes, but they stay in the server's
        session; local ducks leave that, and have the mark.
        """
        found = {}
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if os.getsid(pid) == self.process.pid or self.mark.encode() in environ:
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    found[pid] = command.replace(b"\0", b" ").decode()
        return {pid: command for pid, command in found.items() if command}

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running_server(
    model: Path,
    log: Path,
    *flags: str,
    directory: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """A server that is up; it is ended also when it does not come up.

    directory: it starts there; by default where the tests do.
    environment: what it has besides the tests' own.
    """
    (port,) = free_ports(1)
    mark = f"{MARK}-{uuid.uuid4().hex}"
    command = [
        *(BIN / "vllm", "serve", model, "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "2048", "--max-num-seqs", "16"),
        *flags,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            # The bounds of a slow machine for vLLM's processes too.
            env={
                # Its threads are as many as a user's.
                **{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
                MARK: mark,
                STOP_VARIABLE: str(int(WAIT_S)),
                **(environment or {}),
            },
            cwd=directory,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", mark, log)
    try:
        wait_until(server.is_up)
        yield server
    finally:
        server.kill()


def free_ports(count: int) -> list[int]:
    """Ports of loopback at which nobody listens now."""
    with ExitStack() as stack:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        return [stack.enter_context(each).getsockname()[1] for each in sockets]
