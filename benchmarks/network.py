"""A second host on this machine: a network namespace behind a slow link."""

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def linked_namespace() -> Iterator[tuple[str, list[str]]]:
    """A host behind 2.5 Gb/s and 100 us; its address, and how to run there."""
    name, here, there = "duck-bench", "duck-here", "duck-there"
    commands = (
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip addr add 10.207.0.1/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} addr add 10.207.0.2/30 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
        f"tc qdisc add dev {here} root netem delay 50us rate 2500mbit",
        f"ip netns exec {name} tc qdisc add dev {there} root netem delay 50us "
        "rate 2500mbit",
    )
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
        yield "10.207.0.2", ["ip", "netns", "exec", name]
    finally:
        for command in (f"ip link del {here}", f"ip netns del {name}"):
            with contextlib.suppress(OSError):
                subprocess.run(command.split(), capture_output=True)
