"""Engines of both sides, each in a fresh process: vLLM keeps state in its process."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

T = TypeVar("T")

MAX_MODEL_LEN = 2048
KV_CACHE_BYTES = 256 << 20


def in_fresh_process(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a module-level function in a process of its own; its output goes nowhere."""
    with _fresh_process() as pool:
        return pool.submit(function, *args, **kwargs).result()


@contextmanager
def held_in_process(make: Callable[..., Any], *args: Any) -> Iterator["Held"]:
    """What `make` makes, in a process of its own, to be asked by turns with others."""
    with _fresh_process() as pool:
        pool.submit(_hold, make, args).result()
        yield Held(pool)


class Held:
    """An object in another process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._pool.submit(_ask, method, args, kwargs).result()


def _fresh_process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_be_quiet)


_held: list[Any] = []
# One entry per open block of `closing_engines`.
_closing: list[bool] = []


def _hold(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _held.append(make(*args))


def _ask(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(_held[0], method)(*args, **kwargs)


def start_engine(
    model_dir: Path, *, duck: dict[str, Any] | None, **options: Any
) -> Any:
    """An `LLM`, its engine in this process; with ducks when `duck` is a block."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    settings: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "additional_config": {} if duck is None else {"duck": duck},
        **options,
    }
    return LLM(str(model_dir), **settings)


@contextmanager
def closing_engines() -> Iterator[None]:
    """Ends the engines started in this process, and undoes what they did to it.

    All at once: they share vLLM's process groups. Also one whose start failed, and one
    that a traceback still knows: vLLM would end it when it is collected, and take the
    groups away from the engine that runs by then.
    """
    with ExitStack() as undo:
        undo.callback(_restore_process, _ProcessState.of_now())
        undo.callback(_end_engines)
        undo.callback(_closing.pop)
        _closing.append(True)
        yield


def will_be_closed() -> bool:
    """Whether engines of this process are within a block of `closing_engines`."""
    return bool(_closing)


def _end_engines() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.engine.core_client import InprocClient

    from vllm_duck.worker import DuckWorker

    # Engines hide what they made at their start from the collector.
    gc.unfreeze()
    found = gc.get_objects()
    # Each would collect several times, and a million objects take their time.
    with patch.object(gc, "collect"):
        for client in [each for each in found if type(each) is InprocClient]:
            if hasattr(client, "engine_core"):
                client.shutdown()
        # Of a start that failed.
        for worker in [each for each in found if issubclass(type(each), DuckWorker)]:
            worker.stop_ducks()
        cleanup_dist_env_and_memory()
    del found
    gc.collect()


@dataclass(frozen=True)
class _ProcessState:
    """What vLLM changes for good."""

    environ: dict[str, str]
    cpus: set[int]
    num_torch_threads: int
    set_num_torch_threads: Callable[[int], None]

    @classmethod
    def of_now(cls) -> "_ProcessState":
        import torch

        return cls(
            dict(os.environ),
            os.sched_getaffinity(0),
            torch.get_num_threads(),
            torch.set_num_threads,
        )


def _restore_process(state: _ProcessState) -> None:
    import torch

    os.environ.clear()
    os.environ.update(state.environ)
    os.sched_setaffinity(0, state.cpus)
    torch.set_num_threads = state.set_num_torch_threads
    torch.set_num_threads(state.num_torch_threads)


def duck_logits(
    model_dir: Path, sequences: Sequence[Sequence[int]], **options: Any
) -> list[np.ndarray]:
    """Teacher-forced logits of each sequence through the engine, [T, vocab] fp32.

    The hidden states are taken where vLLM takes them, behind the model's forward; so
    scheduler, paged caches and chunks are all in the path.
    """
    import torch
    from vllm import SamplingParams

    llm = start_engine(model_dir, duck={}, enable_prefix_caching=False, **options)
    model = _model_of(llm)
    seen: list[torch.Tensor] = []
    forward = model.forward

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = forward(*args, **kwargs)
        seen.append(hidden)
        return hidden

    model.forward = recorded
    results = []
    one_token = SamplingParams(max_tokens=1, temperature=0.0)
    for sequence in sequences:
        seen.clear()
        llm.generate({"prompt_token_ids": list(sequence)}, one_token, use_tqdm=False)
        with torch.inference_mode():
            hidden = torch.cat(seen)[: len(sequence)]
            results.append(model.compute_logits(hidden).float().numpy())
    return results


def greedy_tokens(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    duck: dict[str, Any] | None,
    **options: Any,
) -> list[list[int]]:
    """Greedy continuations of the prompts, all in one batch."""
    from vllm import SamplingParams

    llm = start_engine(model_dir, duck=duck, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@dataclass(frozen=True)
class Speed:
    """Medians of one engine, one request at a time."""

    decode_tok_s: float
    prefill_tok_s: float


def engine_speed(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    duck: dict[str, Any] | None,
) -> Speed:
    """Prefill rate of each prompt, and decode rate behind a short one."""
    from vllm import SamplingParams

    llm = start_engine(model_dir, duck=duck, enable_prefix_caching=False)

    def run(prompt: Sequence[int], max_tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and of the rest."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True
        )
        engine = llm.llm_engine
        engine.add_request("0", {"prompt_token_ids": list(prompt)}, sampling)
        start_s = time.perf_counter()
        first_s = 0.0
        while engine.has_unfinished_requests():
            engine.step()
            first_s = first_s or time.perf_counter()
        return first_s - start_s, time.perf_counter() - first_s

    run(prompts[0], 8)
    prefill = [len(prompt) / run(prompt, 1)[0] for prompt in prompts]
    decode = [(num_tokens - 1) / run(prompts[0][:16], num_tokens)[1] for _ in range(3)]
    return Speed(float(np.median(decode)), float(np.median(prefill)))


def transformers_speed(
    checkpoint_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_threads: int,
) -> Speed:
    """The same of transformers' `generate`, in bf16."""
    import torch

    from testing.oracle import load_transformers

    torch.set_num_threads(num_threads)
    model = load_transformers(checkpoint_dir, torch.bfloat16)

    def run(prompt: Sequence[int], max_tokens: int) -> float:
        ids = torch.tensor([list(prompt)])
        start_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        return time.perf_counter() - start_s

    run(prompts[0], 2)
    prefill = [len(prompt) / run(prompt, 1) for prompt in prompts]
    short = prompts[0][:16]
    decode = []
    for _ in range(2):
        first_s = run(short, 1)
        decode.append((num_tokens - 1) / (run(short, num_tokens) - first_s))
    return Speed(float(np.median(decode)), float(np.median(prefill)))


def _model_of(llm: Any) -> Any:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.model


def _be_quiet() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
