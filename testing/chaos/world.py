"""The ducks of an engine, and what can happen to them at random."""

import random
import signal
import socket
import ssl
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from os import kill
from pathlib import Path

from testing.chaos.far import far_duck
from testing.chaos.rogue import RogueHost
from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import make_mini_model
from testing.vllm_server import free_ports
from testing.waiting import WAIT_S
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks

# A call that takes longer is sent again; a duck that is stopped takes so long.
DEADLINE_S = 1.0
LONGEST_STOP_S = 3.0


class World:
    """Two ducks that are started again when they end, each behind a proxy.

    The second one's slice is also held by a duck on a host of its own, if there can be
    one, which is reached in two ways.

    faults: what may happen; each returns when it is over.
    """

    def __init__(
        self,
        model_dir: Path,
        stack: ExitStack,
        rng: random.Random,
        longest_pull_s: float = 3.0,
    ) -> None:
        self._rng, self._stack = rng, stack
        self._model_dir = model_dir
        self._impostors: list[str] = []
        self.ducks = stack.enter_context(
            LocalDucks.start(model_dir, num_threads=1, listen=_free_endpoints(2))
        )
        self.ducks.keep()
        self.proxies = [Meddler(endpoint) for endpoint in self.ducks.endpoints]
        for proxy in self.proxies:
            stack.callback(proxy.close)
        far = stack.enter_context(far_duck(model_dir, "1/2", longest_pull_s, rng))
        first, second = (proxy.endpoint for proxy in self.proxies)
        self.fleet = stack.enter_context(
            Fleet.connect(
                [first, "|".join((second, *far.endpoints))],
                deadline_s=DEADLINE_S,
                recover_s=WAIT_S,
            )
        )
        self.faults: tuple[Callable[[], None], ...] = (
            self.kill_one,
            self.kill_all,
            self.stop_one,
            self.cut,
            self.hold,
            self.damage,
            self.shorten,
            self.repeat,
            self.swap,
            self.delay,
            self.knock,
            self.scan,
            self.speak_tls,
            self.rogue_host,
            self.impostor,
            *far.faults,
        )

    def kill_one(self) -> None:
        _signal(self._rng.choice(self.ducks.pids), signal.SIGKILL)

    def kill_all(self) -> None:
        for pid in self.ducks.pids:
            _signal(pid, signal.SIGKILL)

    def stop_one(self) -> None:
        pid = self._rng.choice(self.ducks.pids)
        _signal(pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.1, LONGEST_STOP_S))
        _signal(pid, signal.SIGCONT)

    def cut(self) -> None:
        self._rng.choice(self.proxies).cut()

    def hold(self) -> None:
        """Also half-open: one of the two ends may be swallowed alone."""
        proxy = self._rng.choice(self.proxies)
        ends = (proxy.passes_to_duck, proxy.passes_to_host)
        for end in self._rng.choice((ends, ends[:1], ends[1:])):
            end.clear()
        time.sleep(self._rng.uniform(0.1, LONGEST_STOP_S))
        proxy.resume()

    def damage(self) -> None:
        """One bit of the next piece."""

        def change(piece: bytes) -> bytes:
            at = self._rng.randrange(len(piece))
            flipped = piece[at] ^ (1 << self._rng.randrange(8))
            return piece[:at] + bytes([flipped]) + piece[at + 1 :]

        self._change_once(change)

    def shorten(self) -> None:
        self._change_once(lambda piece: piece[: self._rng.randrange(len(piece))])

    def repeat(self) -> None:
        self._change_once(lambda piece: piece + piece)

    def swap(self) -> None:
        """The two parts of the next piece change places."""

        def change(piece: bytes) -> bytes:
            at = self._rng.randrange(len(piece))
            return piece[at:] + piece[:at]

        self._change_once(change)

    def delay(self) -> None:
        """The next piece comes late, and then as it was."""

        def change(piece: bytes) -> bytes:
            time.sleep(self._rng.uniform(0.0, 2 * DEADLINE_S))
            return piece

        self._change_once(change)

    def knock(self) -> None:
        """Somebody who speaks no gRPC, and then leaves with or without a word."""
        with suppress(OSError), socket.create_connection(self._address(), 1) as one:
            one.sendall(self._rng.randbytes(self._rng.randrange(1, 4000)))
            time.sleep(self._rng.uniform(0.0, 0.5))
            if self._rng.random() < 0.5:
                reset = struct.pack("ii", 1, 0)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

    def scan(self) -> None:
        """Many connections at once that say nothing."""
        address = self._address()
        with ExitStack() as open_ones, suppress(OSError):
            for _ in range(self._rng.randrange(1, 100)):
                one = socket.create_connection(address, 1)
                open_ones.enter_context(one)
            time.sleep(self._rng.uniform(0.0, 0.5))

    def speak_tls(self) -> None:
        """A client with TLS at a duck without."""
        context = ssl.create_default_context()
        with suppress(OSError), socket.create_connection(self._address(), 1) as one:
            context.wrap_socket(one, server_hostname="localhost").close()

    def rogue_host(self) -> None:
        """Another host that sends what it should not, and does not read replies."""
        endpoint = self._rng.choice(self.ducks.endpoints)
        RogueHost(endpoint, self._rng).run(self._rng.uniform(0.1, 1.0))

    def impostor(self) -> None:
        """At a duck's address another one answers: of its model, or of another."""
        proxy = self._rng.choice(self.proxies)
        rightful = proxy.target
        other = self.proxies[1 - self.proxies.index(proxy)].target
        proxy.target = self._rng.choice((other, _address(self._duck_of_another())))
        proxy.cut()
        time.sleep(self._rng.uniform(0.1, 1.0))
        proxy.target = rightful
        proxy.cut()

    def _duck_of_another(self) -> str:
        """A duck that holds another model; started when first asked for."""
        if not self._impostors:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            another = make_mini_model().write(Path(folder, "another"))
            listen = _free_endpoints(1)
            self._stack.enter_context(
                LocalDucks.start(another, num_ducks=1, num_threads=1, listen=listen)
            )
            self._impostors += listen
        return self._impostors[0]

    def _address(self) -> tuple[str, int]:
        return _address(self._rng.choice(self.ducks.endpoints))

    def _change_once(self, change: Callable[[bytes], bytes]) -> None:
        proxy = self._rng.choice(self.proxies)
        direction = self._rng.choice(("to_duck", "to_host"))
        as_it_is = getattr(proxy, direction)

        def once(piece: bytes, before: int) -> bytes:
            setattr(proxy, direction, as_it_is)
            return change(piece)

        setattr(proxy, direction, once)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def _signal(pid: int, number: int) -> None:
    # It may have ended, and its successor not have begun.
    with suppress(ProcessLookupError):
        kill(pid, number)


def _free_endpoints(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]
