"""A link to a network namespace whose packets are lost, delayed, doubled and swapped.

A TUN device on either side, and a thread that passes the packets on: this does with
true packets what a proxy of TCP cannot, and needs no netem in the kernel.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from testing.network.far_host import run

# From linux/if_tun.h and linux/sched.h.
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000

_HERE, _THERE = (f"duckt{part}{os.getpid()}" for part in ("a", "b"))
_OUR_ADDRESS, _THEIR_ADDRESS = "10.208.0.1", "10.208.0.2"
# Larger than any packet of such a device.
_PACKET_BYTES = 1 << 16


@dataclass
class Weather:
    """What happens to a packet: chances, and the longest delay in seconds."""

    loss: float = 0.0
    doubling: float = 0.0
    swapping: float = 0.0
    delay_s: float = 0.0


class LossyLink:
    """Passes packets between two TUN devices as `weather` says; set it at any time."""

    def __init__(self, here: int, there: int, rng: random.Random) -> None:
        self.address = _THEIR_ADDRESS
        self.weather = Weather()
        self.num_packets = 0
        self._ends = {here: there, there: here}
        self._rng = rng
        self._is_open = True
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _pass_on(self) -> None:
        # Behind the packet after it, by the end that it goes to.
        held: dict[int, bytes] = {}
        while self._is_open:
            ready, _, _ = select.select(list(self._ends), [], [], 0.05)
            for source in ready:
                sink = self._ends[source]
                packet = os.read(source, _PACKET_BYTES)
                self.num_packets += 1
                weather = self.weather
                time.sleep(self._rng.uniform(0.0, weather.delay_s))
                if self._rng.random() < weather.loss:
                    continue
                if sink not in held and self._rng.random() < weather.swapping:
                    held[sink] = packet
                    continue
                copies = 1 + (self._rng.random() < weather.doubling)
                for each in (*[packet] * copies, held.pop(sink, None)):
                    if each is not None:
                        os.write(sink, each)


@contextlib.contextmanager
def lossy_link(namespace: str, rng: random.Random) -> Iterator[LossyLink]:
    """A link to this namespace; raises OSError or CalledProcessError without TUN."""
    here = _tun(_HERE)
    there = _tun_in(namespace, _THERE)
    run(f"ip addr add {_OUR_ADDRESS}/30 dev {_HERE}".split())
    run(f"ip link set {_HERE} up".split())
    run(f"ip -n {namespace} addr add {_THEIR_ADDRESS}/30 dev {_THERE}".split())
    run(f"ip -n {namespace} link set {_THERE} up".split())
    link = LossyLink(here, there, rng)
    try:
        yield link
    finally:
        link.close()


def _tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    request = struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


def _tun_in(namespace: str, name: str) -> int:
    """Such a device in a namespace: it is made where the asking thread is."""
    made: list[int] = []

    def make() -> None:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                return
        made.append(_tun(name))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise OSError(f"no TUN device can be made in the namespace {namespace}")
    return made[0]
