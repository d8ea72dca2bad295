"""The end of an engine: its processes first, then what waits for them."""

import gc
from typing import Any


def stop_in_order(engine: Any) -> None:
    """Before `shutdown`: its processes get time, then nobody waits for their outputs.

    vLLM cancels what reads the engine's outputs while its own handler still waits for
    them, which then logs that the engine died.
    """
    # The server froze its heap: types that are never freed are reported as leaks.
    gc.unfreeze()
    # None where the start has failed: vLLM asks again when the object goes, at the very
    # end of Python.
    engine_core = getattr(engine, "engine_core", None)
    manager = None if engine_core is None else engine_core.resources.engine_manager
    if manager is None:
        return
    from vllm import envs
    from vllm.utils.async_utils import cancel_task_threadsafe

    stop = manager.shutdown

    def stop_then_cancel(timeout: float | None = None) -> None:
        stop(timeout or envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)
        if engine.output_handler is not None:
            cancel_task_threadsafe(engine.output_handler)

    manager.shutdown = stop_then_cancel
