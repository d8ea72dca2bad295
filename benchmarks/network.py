"""A second host on this machine: a network namespace behind a slow link."""

import argparse
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from benchmarks.common import end_with_parent

RATE_MBIT = 2500
# Each way.
DELAY_US = 50
# Of this process alone; an interface has at most 15 letters.
_NAMESPACE, _HERE, _THERE = (f"duck{part}{os.getpid()}" for part in ("", "a", "b"))
_SHAPERS = (
    f"netem delay {DELAY_US}us rate {RATE_MBIT}mbit",
    # Kernels without netem have at least this one; a relay then adds the delay.
    f"tbf rate {RATE_MBIT}mbit burst 64kb latency 50ms",
)


@contextlib.contextmanager
def linked_namespace() -> Iterator[tuple[str, list[str], bool]]:
    """A host behind 2.5 Gb/s and 100 us there and back.

    Gives its address, how to run a command there, and whether the link delays: if not,
    put `delayed` in front of what listens there.

    Raises OSError or CalledProcessError where namespaces cannot be made.
    """
    with linked_addresses(1) as (addresses, inside, has_delay):
        yield addresses[0], inside, has_delay


@contextlib.contextmanager
def linked_addresses(
    num_links: int,
) -> Iterator[tuple[list[str], list[str], bool]]:
    """As `linked_namespace`, for a host with so many links, and an address on each."""
    inside = ["ip", "netns", "exec", _NAMESPACE]
    try:
        _run(f"ip netns add {_NAMESPACE}".split())
        _run(f"ip -n {_NAMESPACE} link set lo up".split())
        shaped = [_add_link(index, inside) for index in range(num_links)]
        yield [_address(index, 2) for index in range(num_links)], inside, all(shaped)
    finally:
        # The other ends go with the namespace; but its end may wait for what is open.
        links = [f"ip link del {_HERE}.{index}" for index in range(num_links)]
        for command in (*links, f"ip netns del {_NAMESPACE}"):
            with contextlib.suppress(OSError):
                subprocess.run(command.split(), capture_output=True)


def _address(index: int, end: int) -> str:
    return f"10.207.{index}.{end}"


def _add_link(index: int, inside: Sequence[str]) -> bool:
    here, there = f"{_HERE}.{index}", f"{_THERE}.{index}"
    for command in (
        f"ip link add {here} type veth peer name {there} netns {_NAMESPACE}",
        f"ip addr add {_address(index, 1)}/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {_NAMESPACE} addr add {_address(index, 2)}/30 dev {there}",
        f"ip -n {_NAMESPACE} link set {there} up",
    ):
        _run(command.split())
    return _shape(here, there, inside)


def _shape(here: str, there: str, inside: Sequence[str]) -> bool:
    """Slow both directions down; whether that includes the delay."""
    for shaper in _SHAPERS:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(f"tc qdisc add dev {here} root {shaper}".split())
            _run([*inside, *f"tc qdisc add dev {there} root {shaper}".split()])
            return shaper.startswith("netem")
    raise OSError("this kernel has neither netem nor tbf to slow a link down")


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


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
