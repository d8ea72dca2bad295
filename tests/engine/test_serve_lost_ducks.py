"""`vllm serve` whose ducks are killed: what its clients and its health check are told.

One server for all: another duck at an endpoint fails a step at once, so nothing here
waits for `recover_s` to pass.
"""

import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import APIError, InternalServerError, OpenAI

from testing.vllm_server import Server, free_ports, running_server
from testing.waiting import WAIT_S, wait_until
from vllm_duck.executor.serve.local import LocalDucks

pytestmark = pytest.mark.vllm

PROMPT = "Is 91 prime?\n"


class Ducks:
    """Two ducks, of which the second one is killed and replaced."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._running: list[LocalDucks] = []
        self._num_spare = 0
        # Of a unix socket a client is not told the path.
        self.endpoints = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self._second = self._start(self.endpoints).pids[1]

    def _start(self, listen: list[str]) -> LocalDucks:
        ducks = LocalDucks.start(self._model, num_threads=1, listen=listen)
        self._running.append(ducks)
        return ducks

    def kill(self) -> None:
        os.kill(self._second, signal.SIGKILL)

    def put_back(self) -> None:
        self._second = self._start([self._spare(), self.endpoints[1]]).pids[1]

    def put_another(self) -> None:
        """A duck with the first one's slice, where the second one's belongs."""
        self._second = self._start([self.endpoints[1], self._spare()]).pids[0]

    def stop(self) -> None:
        for each in self._running:
            each.stop()

    def _spare(self) -> str:
        self._num_spare += 1
        return f"unix:{self._folder}/spare{self._num_spare}"


@pytest.fixture(scope="module")
def ducks(tiny_model, tmp_path_factory) -> Iterator[Ducks]:
    ducks = Ducks(tiny_model, tmp_path_factory.mktemp("ducks"))
    yield ducks
    ducks.stop()


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory, ducks) -> Iterator[Server]:
    settings = {"duck": {"endpoints": ducks.endpoints, "recover_s": WAIT_S}}
    log = tmp_path_factory.mktemp("serve") / "log"
    with running_server(
        tiny_model,
        log,
        *("--additional-config", json.dumps(settings), "--enable-log-requests"),
        environment={
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(int(2 * WAIT_S)),
            # Has /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
        },
    ) as running:
        yield running


@pytest.fixture
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def _ask(client, **request):
    defaults = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0}
    return client.completions.create(
        model="tiny", **{**defaults, **request}, extra_body={"ignore_eos": True}
    )


def _health(server):
    """Status code and body of /health."""
    try:
        with urllib.request.urlopen(f"{server.base_url}/health") as reply:
            status, body = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    return status, json.loads(body) if body else None


@contextmanager
def _begun(client, **request):
    """A stream that has begun."""
    with _ask(client, stream=True, **request) as events:
        yield events, next(iter(events)).choices[0].text


def test_health_names_the_duck_until_it_is_back_and_the_stream_goes_on(
    server, client, ducks
):
    expected = _ask(client).choices[0].text
    assert _health(server) == (200, None)
    with _begun(client) as (events, text):
        ducks.kill()
        wait_until(lambda: _health(server)[1])
        status, body = _health(server)
        assert (status, body["status"]) == (200, "recovering")
        assert [duck["duck"] for duck in body["ducks"]] == [ducks.endpoints[1]]
        ducks.put_back()
        text += "".join(event.choices[0].text for event in events)
    assert text == expected
    assert _health(server) == (200, None)


def test_degraded_is_said_to_clients_and_to_health_and_ends_by_itself(
    server, client, ducks
):
    expected = _ask(client, max_tokens=20).choices[0].text
    with _begun(client) as (events, _):
        ducks.kill()
        ducks.put_another()
        with pytest.raises(APIError) as caught:
            list(events)
    assert caught.value.body["type"] == "ServiceUnavailableError"
    assert caught.value.body["code"] == 503
    assert ducks.endpoints[1] in caught.value.message
    wait_until(lambda: (_health(server)[1] or {"ducks": ()})["ducks"])
    status, body = _health(server)
    assert (status, body["status"]) == (503, "degraded")
    assert [duck["duck"] for duck in body["ducks"]] == [ducks.endpoints[1]]
    for is_stream in (False, True):
        with pytest.raises(InternalServerError) as refused:
            _ask(client, stream=is_stream)
        assert refused.value.status_code == 503
        assert ducks.endpoints[1] in refused.value.message
    ducks.kill()
    ducks.put_back()
    wait_until(lambda: _health(server) == (200, None))
    assert _ask(client, max_tokens=20).choices[0].text == expected


def _num_aborted(server):
    """Requests that vLLM ended because their client had left."""
    return len(re.findall(r"Request \S+ aborted\.", server.log.read_text()))


def test_a_client_that_leaves_while_it_is_answered_ends_its_request(server, client):
    before = _num_aborted(server)
    with _begun(client, max_tokens=1900):
        pass
    wait_until(lambda: _num_aborted(server) == before + 1)


def test_a_client_that_leaves_while_its_prompt_waits_for_a_duck_ends_its_request(
    server, client, ducks
):
    prompt = PROMPT * 100
    expected = _ask(client, prompt=prompt, max_tokens=8).choices[0].text
    _reset_prefix_cache(server)
    before = _num_aborted(server)
    ducks.kill()
    with socket.create_connection(server.address) as leaving:
        leaving.sendall(_post({"prompt": prompt, "max_tokens": 8}))
        wait_until(lambda: _health(server)[1])
    # While the step waits: of that request nothing is written yet.
    wait_until(lambda: _num_aborted(server) == before + 1)
    ducks.put_back()
    assert _ask(client, prompt=prompt, max_tokens=8).choices[0].text == expected


def _reset_prefix_cache(server):
    request = urllib.request.Request(f"{server.base_url}/reset_prefix_cache", b"")
    urllib.request.urlopen(request).close()


def _post(request):
    body = json.dumps({"model": "tiny", **request}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json"
        b"\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


def test_vllm_bench_serve_loses_no_request(server, tiny_model):
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        "base-url": server.base_url,
        "model": "tiny",
        "tokenizer": tiny_model,
        "dataset-name": "random",
        "random-input-len": 20,
        "random-output-len": 10,
        "num-prompts": 12,
        "num-warmups": 0,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    result = main(parser.parse_args([*flags, "--ignore-eos", "--disable-tqdm"]))
    assert result["completed"] == 12
    assert result["total_output_tokens"] == 120


@pytest.mark.last
def test_an_api_server_that_is_killed_leaves_nothing_behind(server, client):
    with _begun(client):
        server.process.kill()
        wait_until(lambda: not server.processes())
