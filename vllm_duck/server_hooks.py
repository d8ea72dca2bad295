"""What the API server of an engine with ducks says while ducks are lost.

Hooks of that process alone: `hooks` installs them when it configures such a server.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from vllm.logger import init_logger

from vllm_duck.config import HandOver, is_duck_engine
from vllm_duck.ending import has_died
from vllm_duck.hook import Hook
from vllm_duck.lost_ducks.health import Health, health_file

logger = init_logger(__name__)


def health_of(vllm_config: Any) -> Health:
    """Of an engine with ducks."""
    return health_file(HandOver.of(vllm_config).health_file).read()


def _tell_of_lost_ducks(original: Callable[..., Any]) -> Callable[..., Any]:
    async def health(raw_request: Any) -> Any:
        from fastapi.responses import JSONResponse

        response = await original(raw_request)
        engine = raw_request.app.state.engine_client
        if not _has_ducks(engine) or response.status_code != 200:
            return response
        found = health_of(engine.vllm_config)
        if found.status == "ok":
            return response
        return JSONResponse(found.answer(), status_code=found.http_status)

    return health


def _refuse_while_degraded(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_admission(self: Any, n: int = 1, request_id: str | None = None) -> None:
        _raise_if_degraded(self)
        original(self, n, request_id)

    return check_admission


def _name_the_duck(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_ducks(self):
            return original(self, *args, **kwargs)
        # Here, since vLLM makes a 500 of what check_admission() raises in its generate.
        _raise_if_degraded(self)
        return _until_a_duck_fails(original(self, *args, **kwargs))

    return generate


def _keep_the_kind_of_error(original: Callable[..., Any]) -> Callable[..., Any]:
    def _convert_generation_error_to_streaming_response(self: Any, e: Any) -> str:
        from vllm.exceptions import RetryableRequestError

        if isinstance(e, RetryableRequestError) and _has_ducks(self.engine_client):
            return str(self.create_streaming_error_response(e))
        return str(original(self, e))

    return _convert_generation_error_to_streaming_response


def _fail_if_the_engine_died(original: Callable[..., Any]) -> Callable[..., Any]:
    async def build_and_serve(engine_client: Any, *args: Any, **kwargs: Any) -> Any:
        last_task = await original(engine_client, *args, **kwargs)
        return _then_fail(last_task, engine_client)

    return build_and_serve


def _has_ducks(engine: Any) -> bool:
    return engine is not None and is_duck_engine(engine.vllm_config)


def _raise_if_degraded(engine: Any) -> None:
    from vllm.exceptions import RetryableRequestError

    if not _has_ducks(engine):
        return
    found = health_of(engine.vllm_config)
    if found.status == "degraded":
        raise RetryableRequestError(found.error)


async def _until_a_duck_fails(outputs: Any) -> AsyncIterator[Any]:
    """The same, but an error that the scheduler gave a reason for is raised."""
    from vllm.exceptions import RetryableRequestError

    # A client that leaves closes this generator, and so must end vLLM's at once.
    async with aclosing(outputs):
        async for output in outputs:
            for each in output.outputs:
                if each.finish_reason == "error" and isinstance(each.stop_reason, str):
                    raise RetryableRequestError(each.stop_reason)
            yield output


async def _then_fail(last_task: Any, engine: Any) -> None:
    """vLLM awaits it when the engine has ended."""
    await last_task
    if has_died(engine):
        logger.error("The engine has died, and this server with it: see above")
        raise SystemExit(1)


SERVER_HOOKS = (
    Hook(
        target="vllm.entrypoints.serve.instrumentator.health.health",
        parameters=("raw_request",),
        why="/health says only whether the engine lives; with ducks it also says which "
        "are lost, and 503 while requests fail for want of one",
        remove_when="a plugin may add to /health",
        make=_tell_of_lost_ducks,
    ),
    Hook(
        target="vllm.v1.engine.async_llm.AsyncLLM.check_admission",
        parameters=("self", "n", "request_id"),
        why="while a duck is missing a request is refused before a stream begins",
        remove_when="a plugin may refuse requests",
        make=_refuse_while_degraded,
    ),
    Hook(
        target="vllm.v1.engine.async_llm.AsyncLLM.generate",
        parameters=(
            *("self", "prompt", "sampling_params", "request_id", "prompt_text"),
            *("lora_request", "tokenization_kwargs", "trace_headers", "priority"),
            *("data_parallel_rank", "session_id", "kv_hints", "reasoning_ended"),
            "reasoning_parser_kwargs",
        ),
        why="a request that ended because a duck is lost would be answered with 500 "
        "and 'Internal server error'; so it is 503 and names the duck",
        remove_when="vLLM's servers pass on the reason of a request's error",
        make=_name_the_duck,
    ),
    Hook(
        target="vllm.entrypoints.generate.base.serving.GenerateBaseServing"
        "._convert_generation_error_to_streaming_response",
        parameters=("self", "e"),
        why="in a stream every error is an InternalServerError, also one that a client "
        "may retry and that comes as ServiceUnavailableError outside of streams",
        remove_when="it asks create_error_response for the type",
        make=_keep_the_kind_of_error,
    ),
    Hook(
        target="vllm.entrypoints.launchers.api_server.entry.build_and_serve",
        parameters=(
            *("engine_client", "listen_address", "sock", "args", "peer_loads"),
            "uvicorn_kwargs",
        ),
        why="`vllm serve` ends with exit code 0 when its engine has died, and so a "
        "service manager would not start it again",
        remove_when="it ends with another one",
        make=_fail_if_the_engine_died,
    ),
)
