"""The end of an engine: its processes first, then what waits for them."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

# For what a SIGTERM ends in order, where nobody waits for it.
_ORPHAN_S = 10.0

# Whether an engine was dead already when its end was asked for.
_was_dead: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


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
    if engine_core is None:
        return
    # Asked for again, every engine is dead.
    _was_dead.setdefault(engine, engine_core.resources.engine_dead)
    manager = engine_core.resources.engine_manager
    if manager is None:
        return
    from vllm import envs
    from vllm.utils.async_utils import cancel_task_threadsafe

    stop = manager.shutdown

    def stop_then_cancel(timeout: float | None = None) -> None:
        # vLLM's monitor calls it too, while requests still have time to end.
        if not manager._finalizer.alive:
            return
        stop(timeout or envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)
        if engine.output_handler is not None:
            cancel_task_threadsafe(engine.output_handler)

    manager.shutdown = stop_then_cancel


def has_died(engine: Any) -> bool:
    """Whether an engine that has ended did so before it was asked to."""
    return _was_dead.get(engine, False)


def end_with_parent() -> None:
    """End this process of `multiprocessing` in order when its parent has been killed.

    vLLM's engine would run on, with its worker and the ducks. By SIGTERM, which also
    ends a step that waits for a duck; without that after a while.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, name="duck-parent", daemon=True).start()
