"""What an API server answers while ducks are lost, and how it ends."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.serve.instrumentator import health as vllm_health
from vllm.exceptions import GenerationError, RetryableRequestError

from vllm_duck import ending, hook, hooks, server_hooks
from vllm_duck.config import HAND_OVER_KEY, HandOver
from vllm_duck.lost_ducks.health import HealthBoard, health_file
from vllm_duck.server_hooks import SERVER_HOOKS

REASON = "duck a:1 has been lost for 60.0 s"


@pytest.fixture
def board(tmp_path):
    return HealthBoard(health_file(str(tmp_path / "health")))


@pytest.fixture
def duck_config(tmp_path, board):
    hand_over = HandOver("fp8", "", str(tmp_path / "health"))
    return SimpleNamespace(additional_config={HAND_OVER_KEY: vars(hand_over)})


STOCK = SimpleNamespace(additional_config={})


def test_every_hook_target_exists_in_the_installed_vllm():
    for each in SERVER_HOOKS:
        hook.find(each)


@pytest.fixture
def ask_health():
    """GET /health of a server whose engine has this configuration."""
    hooks.install_server_hooks()
    hooks.install_server_hooks()
    app = FastAPI()
    app.include_router(vllm_health.router)
    client = TestClient(app)

    def ask(vllm_config, error=None):
        async def check_health():
            if error is not None:
                raise error

        app.state.engine_client = SimpleNamespace(
            vllm_config=vllm_config, check_health=check_health
        )
        return client.get("/health")

    return ask


def test_health_is_vllm_s_own_while_no_duck_is_lost(ask_health, duck_config):
    for config in (STOCK, duck_config):
        reply = ask_health(config)
        assert (reply.status_code, reply.content) == (200, b"")


def test_health_names_the_duck_that_a_step_waits_for(ask_health, board, duck_config):
    board.lost("a:1", "Connection refused")
    reply = ask_health(duck_config)
    assert reply.status_code == 200
    body = reply.json()
    assert body["status"] == "recovering"
    assert body["ducks"][0].keys() == {"duck", "lost_s", "reason"}
    assert body["ducks"][0]["duck"] == "a:1"


def test_health_is_503_while_degraded_and_200_when_the_duck_is_back(
    ask_health, board, duck_config
):
    board.lost("a:1", "Connection refused")
    board.step_failed(REASON)
    reply = ask_health(duck_config)
    assert reply.status_code == 503
    assert reply.json()["status"] == "degraded"
    assert reply.json()["error"] == REASON
    assert [duck["duck"] for duck in reply.json()["ducks"]] == ["a:1"]
    board.looked({})
    assert ask_health(duck_config).status_code == 200


def test_health_of_a_dead_engine_is_vllm_s_own(ask_health, board, duck_config):
    from vllm.v1.engine.exceptions import EngineDeadError

    board.lost("a:1", "Connection refused")
    reply = ask_health(duck_config, EngineDeadError())
    assert (reply.status_code, reply.content) == (503, b"")


def test_a_server_without_an_engine_is_left_alone(ask_health):
    hooks.install_server_hooks()
    app = FastAPI()
    app.include_router(vllm_health.router)
    app.state.engine_client = None
    assert TestClient(app).get("/health").status_code == 200


def test_requests_are_refused_at_once_while_degraded(board, duck_config):
    admitted = []

    def check_admission(self, n=1, request_id=None):
        admitted.append(n)

    async def outputs(self):
        yield SimpleNamespace(outputs=[])

    check = server_hooks._refuse_while_degraded(check_admission)
    generate = server_hooks._name_the_duck(outputs)
    engine = SimpleNamespace(vllm_config=duck_config)
    check(engine, 2)
    generate(engine)
    board.step_failed(REASON)
    for refused in (lambda: check(engine, 3), lambda: generate(engine)):
        with pytest.raises(RetryableRequestError, match="duck a:1") as caught:
            refused()
        assert caught.value.status_code == 503
    check(SimpleNamespace(vllm_config=STOCK), 4)
    board.looked({})
    check(engine, 5)
    assert admitted == [2, 4, 5]


@pytest.mark.parametrize("is_duck", [True, False])
def test_a_request_that_lost_its_duck_is_answered_with_503(duck_config, is_duck):
    def output(finish_reason=None, stop_reason=None):
        each = SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)
        return SimpleNamespace(outputs=[each])

    async def generate(self):
        yield output()
        yield output("stop", "the stop string")
        yield output("error", REASON)

    engine = SimpleNamespace(vllm_config=duck_config if is_duck else STOCK)
    seen = []

    async def consume():
        async for each in server_hooks._name_the_duck(generate)(engine):
            seen.append(each.outputs[0].finish_reason)

    if not is_duck:
        asyncio.run(consume())
        assert seen == [None, "stop", "error"]
        return
    with pytest.raises(RetryableRequestError, match="duck a:1") as caught:
        asyncio.run(consume())
    assert seen == [None, "stop"]
    assert caught.value.status_code == 503


def test_a_stream_s_error_says_that_the_service_is_unavailable(duck_config):
    hooks.install_server_hooks()

    def event(vllm_config, error):
        serving = object.__new__(GenerateBaseServing)
        serving.engine_client = SimpleNamespace(vllm_config=vllm_config)
        text = serving._convert_generation_error_to_streaming_response(error)
        return json.loads(text)["error"]

    lost = event(duck_config, RetryableRequestError(REASON))
    assert (lost["type"], lost["code"]) == ("ServiceUnavailableError", 503)
    assert lost["message"] == REASON
    assert event(duck_config, GenerationError())["type"] == "InternalServerError"
    stock = event(STOCK, RetryableRequestError(REASON))
    assert stock["type"] == "InternalServerError"


class _Engine:
    """As much of an AsyncLLM as its end touches."""

    def __init__(self, config, *, is_dead):
        self.vllm_config = config
        resources = SimpleNamespace(engine_dead=is_dead, engine_manager=None)
        self.engine_core = SimpleNamespace(resources=resources)

    def shutdown(self):
        ending.stop_in_order(self)
        self.engine_core.resources.engine_dead = True


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_server_whose_engine_died_fails(duck_config, is_dead):
    engine = _Engine(duck_config, is_dead=is_dead)

    async def build_and_serve(engine_client):
        async def last_task():
            ends.append(True)

        return last_task()

    async def serve():
        last_task = await server_hooks._fail_if_the_engine_died(build_and_serve)(engine)
        # vLLM asks for the end twice when it was interrupted.
        engine.shutdown()
        engine.shutdown()
        await last_task

    ends = []
    if is_dead:
        with pytest.raises(SystemExit) as caught:
            asyncio.run(serve())
        assert caught.value.code == 1
    else:
        asyncio.run(serve())
    assert ends == [True]
