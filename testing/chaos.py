"""Faults at random while an engine decodes: its tokens stay the undisturbed ones.

`python -m testing.chaos` starts the bundled model's engine, with drafts and in lanes,
and two ducks, each behind a proxy. Round after round it asks some prompts, greedy or
seeded, and meanwhile ducks are killed or stopped, connections cut, held and damaged,
and strangers knock. The last line is the verdict; the seed replays the same faults,
though not to the microsecond.
"""

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from testing.answers import make_prompts, runner_of, start, worker_of
from testing.ducks.meddler import Meddler
from testing.engines import closing_engines
from testing.waiting import WAIT_S
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks

MODEL_DIR = Path(__file__).parent.parent / "models" / "tiny-v32"
NUM_TOKENS = 24
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.1},
)
# A call that takes longer is sent again; a duck that is stopped takes so long.
DEADLINE_S = 1.0
LONGEST_STOP_S = 3.0


class World:
    """Two ducks that are started again when they end, each behind a proxy."""

    def __init__(self, stack: ExitStack, rng: random.Random) -> None:
        self._rng = rng
        self.ducks = stack.enter_context(
            LocalDucks.start(MODEL_DIR, num_threads=1, listen=_free_endpoints(2))
        )
        self.ducks.keep()
        self.proxies = [Meddler(endpoint) for endpoint in self.ducks.endpoints]
        for proxy in self.proxies:
            stack.callback(proxy.close)
        self.fleet = stack.enter_context(
            Fleet.connect(
                [proxy.endpoint for proxy in self.proxies],
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
            self.knock,
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
        proxy = self._rng.choice(self.proxies)
        proxy.hold()
        time.sleep(self._rng.uniform(0.1, LONGEST_STOP_S))
        proxy.resume()

    def damage(self) -> None:
        """One byte of the next piece."""

        def change(piece: bytes) -> bytes:
            at = self._rng.randrange(len(piece))
            flipped = piece[at] ^ (1 << self._rng.randrange(8))
            return piece[:at] + bytes([flipped]) + piece[at + 1 :]

        self._change_once(change)

    def shorten(self) -> None:
        self._change_once(lambda piece: piece[: self._rng.randrange(len(piece))])

    def repeat(self) -> None:
        self._change_once(lambda piece: piece + piece)

    def knock(self) -> None:
        """Somebody who speaks no gRPC, and somebody who says nothing."""
        host, _, port = self._rng.choice(self.ducks.endpoints).rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), 1) as one:
            one.sendall(self._rng.randbytes(self._rng.randrange(1, 4000)))
            time.sleep(self._rng.uniform(0.0, 0.5))

    def _change_once(self, change: Callable[[bytes], bytes]) -> None:
        proxy = self._rng.choice(self.proxies)
        direction = self._rng.choice(("to_duck", "to_host"))
        as_it_is = getattr(proxy, direction)

        def once(piece: bytes, before: int) -> bytes:
            setattr(proxy, direction, as_it_is)
            return change(piece)

        setattr(proxy, direction, once)


class Chaos:
    """An engine in a world of faults; counts rounds, faults and wrong answers."""

    def __init__(self, llm: Any, seed: int) -> None:
        self._llm, self._rng = llm, random.Random(seed)
        self._prompts = make_prompts(MODEL_DIR)
        self.counts: Counter[str] = Counter()

    def run(self, goes_on: Callable[[int], bool]) -> Iterator[str]:
        """Rounds while goes_on(number of rounds); what each did."""
        with ExitStack() as stack:
            world = World(stack, self._rng)
            runner_of(self._llm).attach_ducks(world.fleet)
            stack.callback(
                runner_of(self._llm).attach_ducks, worker_of(self._llm).fleet
            )
            expected = [self._ask(self._prompts, each) for each in SAMPLINGS]
            num_rounds = 0
            while goes_on(num_rounds):
                yield self._round(world, expected)
                num_rounds += 1

    def _round(self, world: World, expected: list[list[list[int]]]) -> str:
        which = self._rng.randrange(len(SAMPLINGS))
        chosen = self._rng.sample(range(len(self._prompts)), self._rng.randrange(1, 6))
        faults = self._rng.choices(world.faults, k=self._rng.randrange(1, 4))
        delays = [self._rng.uniform(0.0, 0.4) for _ in faults]
        started_s = time.monotonic()
        with _meanwhile(faults, delays):
            got = self._ask([self._prompts[i] for i in chosen], SAMPLINGS[which])
        wrong = sum(
            tokens != expected[which][i] for i, tokens in zip(chosen, got, strict=True)
        )
        self.counts.update(rounds=1, faults=len(faults), wrong=wrong)
        names = ", ".join(fault.__name__ for fault in faults)
        seconds = time.monotonic() - started_s
        return f"{len(chosen)} prompts, {names}: {wrong} wrong, {seconds:.1f} s"

    def _ask(
        self, prompts: Sequence[list[int]], sampling: dict[str, Any]
    ) -> list[list[int]]:
        from vllm import SamplingParams

        assert self._llm.reset_prefix_cache()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def _meanwhile(
    faults: Sequence[Callable[[], None]], delays: Sequence[float]
) -> Iterator[None]:
    """Faults one after the other, each after its delay; all are over at the end."""

    def run() -> None:
        for fault, delay in zip(faults, delays, strict=True):
            time.sleep(delay)
            fault()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _signal(pid: int, number: int) -> None:
    # It may have ended, and its successor not have begun.
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_endpoints(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [f"127.0.0.1:{port}" for port in ports]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, closing_engines():
        os.chdir(folder)
        print(f"seed {options.seed}", flush=True)
        chaos = Chaos(start(MODEL_DIR, speculates=True), options.seed)
        end_s = time.monotonic() + options.seconds
        for line in chaos.run(lambda _: time.monotonic() < end_s):
            print(line, flush=True)
        counts = chaos.counts
        verdict = "failed" if counts["wrong"] else "ok"
        print(
            f"chaos {verdict}: {counts['rounds']} rounds, {counts['faults']} faults, "
            f"{counts['wrong']} answers with a wrong token, seed {options.seed}"
        )
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
