"""A network namespace behind links of 2.5 Gb/s, whose cables can be pulled."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RATE_MBIT = 2500
# Each way, where the kernel can delay.
DELAY_US = 50
# Of this process alone; an interface has at most 15 letters.
_NAMESPACE, _HERE, _THERE = (f"duck{part}{os.getpid()}" for part in ("", "a", "b"))
_SHAPERS = (
    f"netem delay {DELAY_US}us rate {RATE_MBIT}mbit",
    # Kernels without netem have at least this one; a relay then adds the delay.
    f"tbf rate {RATE_MBIT}mbit burst 64kb latency 50ms",
)


@dataclass(frozen=True)
class FarHost:
    """A host with an address on each of its links.

    delays: whether the links do so, beside being slow.
    """

    namespace: str
    addresses: tuple[str, ...]
    delays: bool

    @property
    def inside(self) -> list[str]:
        """What runs a command there, as its prefix."""
        return ["ip", "netns", "exec", self.namespace]

    @contextlib.contextmanager
    def unplugged(self, index: int = 0) -> Iterator[None]:
        """Pull the cable of one link, and put it back."""
        link = ["ip", "-n", self.namespace, "link", "set", f"{_THERE}.{index}"]
        run([*link, "down"])
        try:
            yield
        finally:
            run([*link, "up"])


@contextlib.contextmanager
def far_host(num_links: int = 1) -> Iterator[FarHost]:
    """Raises OSError or CalledProcessError where namespaces cannot be made."""
    inside = ["ip", "netns", "exec", _NAMESPACE]
    try:
        run(f"ip netns add {_NAMESPACE}".split())
        run(f"ip -n {_NAMESPACE} link set lo up".split())
        shaped = [_add_link(index, inside) for index in range(num_links)]
        addresses = tuple(_address(index, 2) for index in range(num_links))
        yield FarHost(_NAMESPACE, addresses, all(shaped))
    finally:
        # The other ends go with the namespace; but its end may wait for what is open.
        links = [f"ip link del {_HERE}.{index}" for index in range(num_links)]
        for command in (*links, f"ip netns del {_NAMESPACE}"):
            with contextlib.suppress(OSError):
                subprocess.run(command.split(), capture_output=True)


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


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
        run(command.split())
    return _shape(here, there, inside)


def _shape(here: str, there: str, inside: Sequence[str]) -> bool:
    """Slow both directions down; whether that includes the delay."""
    for shaper in _SHAPERS:
        with contextlib.suppress(subprocess.CalledProcessError):
            run(f"tc qdisc add dev {here} root {shaper}".split())
            run([*inside, *f"tc qdisc add dev {there} root {shaper}".split()])
            return shaper.startswith("netem")
    raise OSError("this kernel has neither netem nor tbf to slow a link down")
