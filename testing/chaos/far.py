"""A duck on a host of its own, where cables are pulled and packets lost."""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from testing.ducks.process import DuckProcess
from testing.network.far_host import FarHost, far_host
from testing.network.lossy_link import LossyLink, Weather, lossy_link
from testing.vllm_server import free_ports

LONGEST_RAIN_S = 3.0
# Such that something of each kind happens to the few packets of a step.
STORM = Weather(loss=0.05, doubling=0.1, swapping=0.1, delay_s=0.002)


class Far:
    """The far duck and its links; `endpoints` are ways to the same duck."""

    def __init__(
        self,
        duck: DuckProcess,
        endpoints: tuple[str, ...],
        host: FarHost | None,
        link: LossyLink | None,
        longest_pull_s: float,
        rng: random.Random,
    ) -> None:
        self._duck, self._host, self._link, self._rng = duck, host, link, rng
        self._longest_pull_s = longest_pull_s
        self.endpoints = endpoints
        self.faults: tuple[Callable[[], None], ...] = (self.kill_the_far_duck,)
        if host is not None:
            self.faults += (self.pull_the_cable, self.storm)

    def kill_the_far_duck(self) -> None:
        self._duck.kill()

    def pull_the_cable(self) -> None:
        assert self._host is not None
        with self._host.unplugged():
            time.sleep(self._rng.uniform(0.1, self._longest_pull_s))

    def storm(self) -> None:
        """Packets are lost, doubled, swapped and late on the other way to it."""
        assert self._link is not None
        self._link.weather = STORM
        time.sleep(self._rng.uniform(0.1, LONGEST_RAIN_S))
        self._link.weather = Weather()


@contextmanager
def far_duck(
    model_dir: Path, shard: str, longest_pull_s: float, rng: random.Random
) -> Iterator[Far]:
    """A duck behind two links of its own where root may make them, or on loopback.

    Of the links one is a cable of 2.5 Gb/s, the other one loses packets.
    """
    with ExitStack() as stack:
        host, link = _own_host(stack), None
        addresses, listen = ["127.0.0.1"], "127.0.0.1"
        (port,) = free_ports(1)
        if host is not None:
            link = stack.enter_context(lossy_link(host.namespace, rng))
            addresses, listen = [host.addresses[0], link.address], "0.0.0.0"
        duck = DuckProcess(
            [str(model_dir), f"--shard={shard}"],
            f"{listen}:{port}",
            rng,
            [] if host is None else host.inside,
        )
        stack.callback(duck.stop)
        endpoints = tuple(f"{address}:{port}" for address in addresses)
        yield Far(duck, endpoints, host, link, longest_pull_s, rng)


def _own_host(stack: ExitStack) -> FarHost | None:
    try:
        return stack.enter_context(far_host())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no hosts of their own here, so no cables to pull: {error}", flush=True)
        return None
