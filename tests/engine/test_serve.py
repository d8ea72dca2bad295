"""`vllm serve` as a user runs it: OpenAI client, Ctrl-C, and nothing left behind."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from testing.tool_calls import CALL, CHAT_FLAGS, call_at_once, call_in_pieces
from testing.vllm_server import Server, running_server
from testing.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.vllm


def _without_chat_template(model: Path, directory: Path) -> Path:
    """The same checkpoint as DeepSeek publishes V3.2: without a template for chats."""
    for path in model.iterdir():
        if path.name != "chat_template.jinja":
            (directory / path.name).symlink_to(path.resolve())
    return directory


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory, hostile_directory) -> Iterator[Server]:
    """Started where a user has modules of his own, and for the first time."""
    with running_server(
        _without_chat_template(tiny_model, tmp_path_factory.mktemp("model")),
        tmp_path_factory.mktemp("serve") / "log",
        *("--additional-config", '{"duck": {"local_ducks": 2}}'),
        *CHAT_FLAGS,
        *("--shutdown-timeout", str(int(WAIT_S))),
        directory=hostile_directory,
        # vLLM remembers there what it learns about models.
        environment={"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))},
    ) as running:
        yield running


@pytest.fixture
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none")


PROMPTS = [f"Is {number} prime?\n" for number in (91, 97, 101, 119)]


def test_nothing_is_imported_from_the_working_directory(server, hostile_directory):
    assert not list(hostile_directory.glob("*.executed"))


def test_the_kv_caches_have_what_the_requests_could_use(server):
    line = "tokens, as 16 requests of 2,048 could use; --kv-cache-memory-bytes sets"
    assert line in server.log.read_text()


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
    # How many, apart from the role, depends on how fast each side is.
    assert len(pieces) > 1


def test_vllm_encodes_chats_itself(server):
    assert "tokenizer_mode='deepseek_v32'" in server.log.read_text()


def test_reasoning_comes_apart_from_the_answer(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Is 91 prime?"}],
        max_tokens=200,
        temperature=0,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    message = answer.choices[0].message
    assert message.reasoning
    assert message.content
    assert "think>" not in message.reasoning + message.content


def test_a_tool_call_comes_at_once_and_in_pieces(client):
    assert call_at_once(client) == call_in_pieces(client) == CALL


def test_concurrent_requests_get_the_answers_they_get_alone(server, client):
    def options(prompt):
        return {"model": "tiny", "prompt": prompt, "max_tokens": 30, "temperature": 0}

    alone = [client.completions.create(**options(p)).choices[0].text for p in PROMPTS]

    async def ask_all():
        url = f"{server.base_url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none") as concurrent:
            answers = await asyncio.gather(
                *(concurrent.completions.create(**options(p)) for p in PROMPTS * 2)
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask_all()) == alone * 2


def test_ducks_run_beside_the_server(server):
    ducks = [c for c in server.processes().values() if "vllm_duck.cli serve" in c]
    assert len(ducks) == 2


@pytest.mark.last
def test_ctrl_c_ends_everything_with_exit_code_0_when_requests_have_ended(
    server, client
):
    events = client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(events))
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, events)
        exit_code = server.interrupt()
    assert rest.result()[-1].choices[0].finish_reason == "length"
    assert exit_code == 0, server.log.read_text()[-3000:]
    wait_until(lambda: not server.processes())
    server.assert_calm()
