"""Ducks with one slice stand in for each other: calls in flight go to the next one."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from testing.ducks.meddler import Meddler
from testing.ducks.mini_model import make_info, make_request
from testing.ducks.wire_peers import BOTH_CLIENTS, calling, check_echo, serving
from testing.waiting import WAIT_S, wait_until
from vllm_duck.errors import DuckConfigError, DuckUnavailable
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.wire.bf16 import bf16_to_f32

pytestmark = pytest.mark.parametrize("client", BOTH_CLIENTS)


@pytest.fixture
def meddlers():
    """Two ducks, each behind a proxy."""
    with contextlib.ExitStack() as stack:
        found = []
        for kind in ("grpcio", "grpcio"):
            server = stack.enter_context(serving(kind))
            found.append(Meddler(server.endpoint))
            stack.callback(found[-1].close)
        yield found


def _name(meddlers):
    return "|".join(each.endpoint for each in meddlers)


def test_calls_in_flight_go_to_the_next_replica(client, meddlers):
    first, second = meddlers
    with calling(client, [_name(meddlers)], recover_s=WAIT_S) as fan_out:
        check_echo(fan_out, make_request())
        assert not second.num_connections
        first.passes_to_host.clear()
        requests = [make_request(seed=seed) for seed in range(3)]
        pendings = [fan_out.send(request) for request in requests]
        first.close()
        for request, pending in zip(requests, pendings, strict=True):
            expected = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.wait().total, expected)
        assert second.num_connections
        # And it stays there.
        num_connections = second.num_connections
        check_echo(fan_out, make_request(seed=9))
        assert second.num_connections == num_connections


def test_a_late_replica_is_left_for_the_next_one(client, meddlers):
    first, second = meddlers
    # Any duck is late now and then on a slow machine, and both take turns then.
    with calling(client, [_name(meddlers)], deadline_s=2.0, recover_s=WAIT_S) as each:
        first.hold()
        check_echo(each, make_request())
        assert second.num_connections


def test_all_replicas_gone_is_an_error_that_names_them(client, tmp_path):
    name = f"unix:{tmp_path}/a|unix:{tmp_path}/b"
    with calling(client, [name], recover_s=0.3) as fan_out:
        with pytest.raises(DuckUnavailable) as caught:
            fan_out.send(make_request()).wait()
        assert f"duck {name} has been lost for" in str(caught.value)


def test_a_replica_that_is_away_at_the_start_is_named_and_used_later(
    client, tmp_path, caplog
):
    a, b = f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"
    transport = "auto" if client == "native" else "grpcio"
    with contextlib.ExitStack() as stack:
        with serving("grpcio", listen=b):
            fleet = stack.enter_context(
                Fleet.connect([f"{a}|{b}"], transport=transport, recover_s=WAIT_S)
            )
            assert f"replica {a} does not answer" in caplog.text
            check_echo(fleet, make_request())
        stack.enter_context(serving("grpcio", listen=a))
        check_echo(fleet, make_request(seed=1))
        wait_until(lambda: "is back after" in caplog.text)


def test_replicas_with_different_slices_are_refused(client, tmp_path):
    a, b = f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"
    other = DuckServer(None, replace(make_info(), shard=Shard(0, 80, 0, 4)), listen=b)
    other.start()
    match = rf"same slice, got .*columns=0:160.* at {a} and .*columns=0:80.* at {b}"
    try:
        with (
            serving("grpcio", listen=a),
            pytest.raises(DuckConfigError, match=match),
        ):
            Fleet.connect([f"{a}|{b}"])
    finally:
        other.stop(0)
