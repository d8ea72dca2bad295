"""A server under mixed load for long, while a duck is killed again and again.

`python -m testing.soak` starts `vllm serve` with drafts and lanes and two ducks, and 64
clients: prompts that share beginnings, all sampling options, and every eighth request
leaves before its answer is whole. One duck is killed every 30 seconds. Every greedy or
seeded answer is compared with the first one to the same request.

The last line is the verdict: no request lost, no answer changed, and of server and
ducks neither memory nor threads nor open files grew between the first quarter and the
end.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.answers import QUESTIONS
from testing.ducks.process import DuckProcess
from testing.vllm_server import Server, free_ports, running_server

MODEL_DIR = Path(__file__).parents[1] / "models" / "tiny-v32"
NUM_CLIENTS = 64
KILL_EVERY_S = 30.0
LOOK_EVERY_S = 5.0
# What vLLM's own pools and Python's arenas may still take after the first quarter.
MAX_GROWTH_MB = 64.0

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {"40": 2.0}, "presence_penalty": 0.5},
    {"temperature": 0.7, "seed": 7, "extra_body": {"top_k": 20, "min_p": 0.05}},
    {"temperature": 0.9, "seed": 8, "stop": ["9", ":"]},
    {"temperature": 0.0, "extra_body": {"repetition_penalty": 1.2}},
)


@dataclass(frozen=True)
class Use:
    """What processes hold: resident MB, and open files and threads, all together."""

    memory_mb: float
    num_files: int
    num_threads: int

    @classmethod
    def of(cls, pids: list[int]) -> "Use":
        memory_mb, num_files, num_threads = 0.0, 0, 0
        for pid in pids:
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            # Zombies have none.
            memory_mb += int(fields.get("RssAnon", "0 kB").split()[0]) / 1024
            num_threads += int(fields["Threads"])
            num_files += len(os.listdir(f"/proc/{pid}/fd"))
        return cls(memory_mb, num_files, num_threads)

    def __str__(self) -> str:
        return (
            f"{self.memory_mb:.0f} MB, {self.num_files} files, "
            f"{self.num_threads} threads"
        )


class Clients:
    """Many at once; counts what became of their requests."""

    def __init__(self, base_url: str, seed: int) -> None:
        self._base_url, self._rng = base_url, random.Random(seed)
        self._first: dict[tuple[int, int, int], str] = {}
        self.counts: Counter[str] = Counter()

    async def run(self, goes_on: Callable[[], bool]) -> None:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(
            base_url=f"{self._base_url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            asking = (self._one(client, goes_on) for _ in range(NUM_CLIENTS))
            await asyncio.gather(*asking)

    async def _one(self, client: Any, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))
            try:
                await self._ask(client)
            except Exception as error:
                self.counts["lost"] += 1
                print(f"lost: {type(error).__name__}: {error}", flush=True)

    async def _ask(self, client: Any) -> None:
        rng = self._rng
        which, how, num_tokens = (
            rng.randrange(2 * len(QUESTIONS)),
            rng.randrange(len(SAMPLINGS)),
            rng.choice((5, 20, 60)),
        )
        question = QUESTIONS[which % len(QUESTIONS)]
        shared = "A list of sums, one in a line.\n" * 20
        prompt = shared + question if which >= len(QUESTIONS) else question
        events = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=num_tokens,
            stream=True,
            **SAMPLINGS[how],
        )
        leaves = rng.random() < 1 / 8
        text = ""
        async with events:
            async for event in events:
                text += event.choices[0].text
                if leaves and len(text) > 5:
                    self.counts["left"] += 1
                    return
        self.counts["answered"] += 1
        expected = self._first.setdefault((which, how, num_tokens), text)
        self.counts["changed"] += text != expected


async def _load(
    server: Server, ducks: Sequence[DuckProcess], seconds: float, seed: int
) -> tuple[Clients, list[tuple[Use, Use]], int]:
    """The clients at the end, what server and first duck held, the number of kills."""
    clients = Clients(server.base_url, seed)
    begun_s = time.monotonic()
    running = asyncio.create_task(
        clients.run(lambda: time.monotonic() - begun_s < seconds)
    )
    uses, num_kills = [], 0
    while not running.done():
        await asyncio.wait([running], timeout=LOOK_EVERY_S)
        uses.append((Use.of(list(server.processes())), Use.of([ducks[0].pid])))
        if (num_kills + 1) * KILL_EVERY_S < time.monotonic() - begun_s < seconds:
            await asyncio.to_thread(ducks[1].kill)
            num_kills += 1
        counted = ", ".join(f"{n} {what}" for what, n in clients.counts.items() if n)
        at_s = time.monotonic() - begun_s
        server_use, duck_use = uses[-1]
        print(
            f"{at_s:4.0f} s: {counted}; server {server_use}; duck {duck_use}",
            flush=True,
        )
    await running
    return clients, uses, num_kills


def _growth(uses: list[Use]) -> Use:
    """From the first quarter's largest to the last quarter's smallest."""
    quarter = max(1, len(uses) // 4)
    before, after = uses[:quarter], uses[-quarter:]

    def grown(read: Callable[[Use], float]) -> float:
        return min(map(read, after)) - max(map(read, before))

    return Use(
        grown(lambda use: use.memory_mb),
        int(grown(lambda use: use.num_files)),
        int(grown(lambda use: use.num_threads)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m testing.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="of load (default: 600)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the clients' choices")
    options = parser.parse_args()
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(options.seed)
        ducks = [
            DuckProcess([str(MODEL_DIR), f"--shard={index}/2"], endpoint, rng)
            for index, endpoint in enumerate(endpoints)
        ]
        flags = (
            *("--speculative-config", '{"method": "duck_mtp1"}'),
            *("--additional-config", _settings(endpoints)),
        )
        try:
            with running_server(MODEL_DIR, Path(folder, "log"), *flags) as server:
                clients, uses, num_kills = asyncio.run(
                    _load(server, ducks, options.seconds, options.seed)
                )
                code = server.interrupt()
        finally:
            for duck in ducks:
                duck.stop()
    growths = [_growth([pair[i] for pair in uses]) for i in range(2)]
    has_grown = any(
        each.memory_mb > MAX_GROWTH_MB or each.num_files > 0 or each.num_threads > 0
        for each in growths
    )
    counts = clients.counts
    is_ok = not (counts["lost"] or counts["changed"] or has_grown or code)
    print(
        f"soak {'ok' if is_ok else 'failed'}: {counts['answered']} answered, "
        f"{counts['left']} left, {counts['lost']} lost, {counts['changed']} changed, "
        f"{num_kills} ducks killed; growth of the server: {growths[0]}; of the duck: "
        f"{growths[1]}; exit code {code}"
    )
    return int(not is_ok)


def _settings(endpoints: list[str]) -> str:
    return json.dumps({"duck": {"endpoints": endpoints, "draft_gate": False}})


if __name__ == "__main__":
    sys.exit(main())
