"""The example of a stranger's client runs against both servers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.executor.wire_peers import SERVERS, serving

CLIENT = Path(__file__).parent.parent / "examples" / "grpc_client.py"


@pytest.mark.parametrize("server", SERVERS)
def test_the_stock_client_calls_a_duck(server):
    with serving(server) as running:
        done = subprocess.run(
            [sys.executable, CLIENT, running.endpoint],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert "model f00d, layers [1, 2, 3]" in done.stdout
    assert "norms" in done.stdout
