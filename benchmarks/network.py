"""A relay that delays, for links of kernels that cannot."""

import argparse
import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from benchmarks.common import end_with_parent
from testing.network.far_host import DELAY_US


@contextlib.contextmanager
def delayed(listen: str, target: str, inside: Sequence[str]) -> Iterator[None]:
    """Run a relay from `listen` to `target` (HOST:PORT) that delays all bytes."""
    command = [sys.executable, "-m", "benchmarks.network", listen, target]
    process = subprocess.Popen([*inside, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the relay did not start")
        yield
    finally:
        process.terminate()
        process.wait()


def relay(listen: str, target: str) -> None:
    """Forward connections for ever; each byte leaves DELAY_US after it came."""
    host, port = listen.rsplit(":", 1)
    with socket.create_server((host, int(port))) as server:
        print("ready", flush=True)
        while True:
            here, _ = server.accept()
            host, port = target.rsplit(":", 1)
            there = socket.create_connection((host, int(port)))
            for source, sink in ((here, there), (there, here)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _forward(source, sink)


def _forward(source: socket.socket, sink: socket.socket) -> None:
    """One direction, in two threads, so that delays overlap."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                data = source.recv(1 << 18)
            except ConnectionResetError:
                data = b""
            waiting.put((time.perf_counter() + DELAY_US / 1e6, data))
            if not data:
                return

    def send() -> None:
        while True:
            due_s, data = waiting.get()
            time.sleep(max(0.0, due_s - time.perf_counter()))
            try:
                if data:
                    sink.sendall(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                # The other side has gone, and with it who would want the rest.
                return
            if not data:
                return

    for run in (receive, send):
        threading.Thread(target=run, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=relay.__doc__)
    parser.add_argument("listen", help="HOST:PORT")
    parser.add_argument("target", help="HOST:PORT")
    options = parser.parse_args()
    end_with_parent()
    relay(options.listen, options.target)


if __name__ == "__main__":
    main()
