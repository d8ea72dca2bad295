"""`vllm serve` as a user runs it: OpenAI client, Ctrl-C, and nothing left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.vllm

BIN = Path(sys.executable).parent
START_S = 240
MARK = "DUCK_TEST_MARK"


@dataclass
class Server:
    process: subprocess.Popen
    base_url: str
    mark: str
    log: Path

    def interrupt(self) -> int:
        """What Ctrl-C in a terminal does; returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(60)


def marked_processes(mark: str) -> list[str]:
    """Command lines of all processes that inherited the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes()
                    found.append(command.replace(b"\0", b" ").decode())
            except OSError:
                continue
    return [command for command in found if command]


def start_server(model: Path, log: Path, *flags: str) -> Server:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mark = f"{MARK}-{uuid.uuid4().hex}"
    command = [
        *(BIN / "vllm", "serve", model, "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "1024", "--kv-cache-memory-bytes", str(128 << 20)),
        *flags,
    ]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    server = Server(process, f"http://127.0.0.1:{port}", mark, log)
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.base_url}/health", timeout=5):
                return server
        except OSError:
            time.sleep(0.3)
    process.kill()
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-5000:]}")


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    running = start_server(
        tiny_model, log, "--additional-config", '{"duck": {"local_ducks": 2}}'
    )
    yield running
    if running.process.poll() is None:
        running.interrupt()


@pytest.fixture
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none")


PROMPTS = [f"Is {number} prime?\n" for number in (91, 97, 101, 119)]


def test_completions(client):
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[0], max_tokens=20, temperature=0
    )
    assert answer.usage.completion_tokens == 20
    assert answer.choices[0].text


def test_a_streamed_chat_says_what_a_whole_one_says(client):
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is 62 + 44?"}],
        "max_tokens": 60,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request).choices[0].message.content
    events = client.chat.completions.create(**request, stream=True)
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == whole
    assert len(pieces) > 5


def test_concurrent_requests_get_the_answers_they_get_alone(server, client):
    def options(prompt):
        return {"model": "tiny", "prompt": prompt, "max_tokens": 30, "temperature": 0}

    alone = [client.completions.create(**options(p)).choices[0].text for p in PROMPTS]

    async def ask_all():
        concurrent = AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none")
        answers = await asyncio.gather(
            *(concurrent.completions.create(**options(p)) for p in PROMPTS * 2)
        )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask_all()) == alone * 2


def test_ducks_run_beside_the_server(server):
    ducks = [c for c in marked_processes(server.mark) if "vllm_duck.cli serve" in c]
    assert len(ducks) == 2


# Last in this module: it ends the server.
def test_ctrl_c_ends_everything_with_exit_code_0(server):
    assert server.interrupt() == 0, server.log.read_text()[-3000:]
    give_up_s = time.monotonic() + 20
    while marked_processes(server.mark) and time.monotonic() < give_up_s:
        time.sleep(0.2)
    assert marked_processes(server.mark) == []
