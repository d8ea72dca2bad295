"""A process of an engine ends when the one that started it was killed."""

import signal
import subprocess
import sys

from testing.waiting import is_running, wait_until

_PARENT = """
import multiprocessing, os, signal, time
from vllm_duck import ending

def say(line):
    # At once: with PYTHONUNBUFFERED, print() writes the end of the line by itself.
    os.write(1, f"{line}\\n".encode())

def child(ignores):
    if ignores:
        ending._ORPHAN_S = 0.1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ending.end_with_parent()
    say("ready")
    time.sleep(900)

if __name__ == "__main__":
    ending.end_with_parent()  # nobody's child
    context = multiprocessing.get_context("spawn")
    for ignores in (False, True):
        process = context.Process(target=child, args=(ignores,))
        process.start()
        say(process.pid)
    time.sleep(900)
"""


def test_processes_end_when_their_parent_is_killed(tmp_path):
    path = tmp_path / "parent.py"
    path.write_text(_PARENT)
    parent = subprocess.Popen(
        [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with parent:
        lines = [parent.stdout.readline().decode().strip() for _ in range(4)]
        pids = [line for line in lines if line != "ready"]
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)))
