"""A native duck at the limit of open files: says so once, rests, and comes back."""

import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, check_echo, needs_native
from testing.waiting import wait_until

pytestmark = needs_native

# Room for two connections more than it has when it serves.
_DUCK = """
import os, resource, signal
from testing.ducks.wire_peers import serving
with serving("native") as server:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    limits = (highest + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(server.endpoint, flush=True)
    signal.sigwait({signal.SIGTERM})
"""


def _is_asleep(pid):
    """Whether no thread runs or wants to: one that polls in a loop always does."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all(
        (task / "stat").read_text().rpartition(")")[2].split()[0] == "S"
        for task in tasks
    )


def test_a_duck_without_descriptors_says_so_once_and_rests(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as stderr:
        duck = subprocess.Popen(
            [sys.executable, "-c", _DUCK],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        endpoint = duck.stdout.readline().strip()
        host, _, port = endpoint.rpartition(":")
        with calling("native", [endpoint]) as fan_out, ExitStack() as stack:
            check_echo(fan_out, make_request())
            for _ in range(20):
                stack.enter_context(socket.create_connection((host, int(port))))
            wait_until(lambda: "Too many open files" in log.read_text())
            wait_until(lambda: _is_asleep(duck.pid))
            # Who is in is served.
            check_echo(fan_out, make_request(seed=1))
            # It rests and tries again, several times, without another word.
            stack.close()
            with calling("native", [endpoint]) as later:
                check_echo(later, make_request(seed=2))
        assert log.read_text().count("\n") == 1
        assert "Raise the limit of open files (ulimit -n)" in log.read_text()
    finally:
        duck.kill()
        duck.communicate()
