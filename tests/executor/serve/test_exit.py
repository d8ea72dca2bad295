"""A process ends cleanly while threads of it are in the C++ extensions."""

import subprocess
import sys
import textwrap

from testing.ducks.wire_peers import needs_native
from testing.waiting import WAIT_S


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_daemon_threads_that_compute_do_not_abort_the_process():
    run("""
        import threading
        from vllm_duck.executor import _kernel

        data, is_running = bytes(8 << 20), threading.Event()

        def compute():
            while True:
                _kernel.crc32c(data, 0)
                is_running.set()

        for _ in range(3):
            threading.Thread(target=compute, daemon=True).start()
        is_running.wait()
    """)


@needs_native
def test_a_server_that_was_not_stopped_does_not_abort_the_process():
    run("""
        import threading
        from testing.ducks.mini_model import make_info, make_request
        from testing.ducks.echo import echo_compute
        from vllm_duck.executor.wire.identity import identity_of
        from vllm_duck.executor.native.client import NativeFanOut
        from vllm_duck.executor.native.server import NativeDuckServer
        from vllm_duck.executor.wire.security import ClientSecurity

        info = make_info()
        server = NativeDuckServer(echo_compute(), info, listen="127.0.0.1:0")
        server.start()
        client = NativeFanOut(
            [server.endpoint],
            identities=[identity_of(info)],
            deadline_s=600,
            reply_dtype="bf16",
            security=ClientSecurity(),
        )
        is_running = threading.Event()

        def call():
            while True:
                client.send(make_request()).wait()
                is_running.set()

        threading.Thread(target=call, daemon=True).start()
        is_running.wait()
    """)
