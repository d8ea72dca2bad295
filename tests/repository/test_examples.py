"""The example of a stranger's client runs against both servers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.ducks.wire_peers import SERVERS, serving
from testing.waiting import WAIT_S

CLIENT = Path(__file__).parents[2] / "examples" / "grpc_client.py"


@pytest.mark.parametrize("server", SERVERS)
def test_the_stock_client_calls_a_duck_and_no_proxy(server):
    proxies = dict.fromkeys(["http_proxy", "grpc_proxy"], "http://127.0.0.1:1")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("no_")}
    with serving(server) as running:
        done = subprocess.run(
            [sys.executable, CLIENT, running.endpoint],
            env={**environ, **proxies},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    assert done.returncode == 0, done.stderr
    assert "model f00d, layers [1, 2, 3]" in done.stdout
    assert "norms" in done.stdout
