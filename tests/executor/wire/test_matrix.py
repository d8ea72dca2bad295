"""Every client against every server: the same bytes, whoever speaks."""

import numpy as np
import pytest

from testing.ducks.mini_model import make_info, make_request
from testing.ducks.wire_peers import (
    CLIENTS,
    SERVERS,
    calling,
    echo,
    is_native_built,
    replies_of,
    serving,
)
from vllm_duck.executor.duck import MoeRequest
from vllm_duck.executor.wire.bf16 import bf16_to_f32

# Hidden sizes; one row each. 64 B, around one and two HTTP/2 frames, and in between.
SIZES = [32, 7168, 8170, 8186, 8192, 16_384, 65_536]


def _request(rows, hidden_size, seed=0):
    rng = np.random.default_rng(seed)
    return MoeRequest(
        layer_idx=2,
        # Random bits, NaNs among them: bytes must come back as they are.
        hidden=rng.integers(0, 1 << 16, (rows, hidden_size), np.uint16),
        topk_ids=rng.integers(0, 4, (rows, 2), np.int32),
        topk_weights=rng.random((rows, 2), np.float32),
    )


@pytest.fixture(params=SERVERS)
def server(request):
    with serving(request.param) as running:
        yield running


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("reply_dtype", ["bf16", "fp32"])
def test_random_bytes_of_every_size_come_back(server, client, reply_dtype):
    with calling(client, [server.endpoint], reply_dtype=reply_dtype) as fan_out:
        for size in SIZES:
            request = _request(1, size, seed=size)
            (reply,) = replies_of(fan_out.send(request))
            expected = echo(request, reply_dtype)
            assert reply.partial.dtype == expected.dtype
            assert reply.partial.tobytes() == expected.tobytes()


@pytest.mark.parametrize("client", CLIENTS)
def test_30_mb_come_back(server, client):
    request = _request(2100, 7168)
    with calling(client, [server.endpoint]) as fan_out:
        (reply,) = replies_of(fan_out.send(request))
    assert reply.partial.tobytes() == request.hidden.tobytes()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_request_without_rows_gets_a_sum_without_rows(server, client):
    with calling(client, [server.endpoint] * 2) as fan_out:
        total = fan_out.send(_request(0, 32)).wait().total
    assert total.shape == (0, 32)


@pytest.mark.parametrize("client", CLIENTS)
def test_many_requests_in_flight_find_their_own_replies(server, client):
    requests = [make_request(1 + seed % 3, seed=seed) for seed in range(20)]
    with calling(client, [server.endpoint] * 2) as fan_out:
        pendings = [fan_out.send(request) for request in requests]
        for request, pending in reversed(list(zip(requests, pendings, strict=True))):
            x = bf16_to_f32(request.hidden)
            np.testing.assert_array_equal(pending.wait().total, x + x)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_large_and_a_small_request_in_flight_at_once(server, client):
    large, small = _request(2100, 7168), _request(1, 32)
    with calling(client, [server.endpoint]) as fan_out:
        pendings = [fan_out.send(request) for request in (large, small)]
        for request, pending in reversed(
            list(zip((large, small), pendings, strict=True))
        ):
            (reply,) = replies_of(pending)
            assert reply.partial.tobytes() == request.hidden.tobytes()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_fleet_of_both_servers_is_summed(client):
    request = make_request(2, hidden_size=7168)
    with (
        serving("grpcio") as first,
        serving("native" if is_native_built() else "grpcio") as second,
        calling(client, [first.endpoint, second.endpoint] * 2) as fan_out,
    ):
        total = fan_out.send(request).wait().total
    x = bf16_to_f32(request.hidden)
    np.testing.assert_array_equal(total, ((x + x) + x) + x)


def test_the_info_of_every_server_is_the_same(server):
    from vllm_duck.executor.grpcio.describer import GrpcDescriber

    duck = GrpcDescriber(server.endpoint)
    info = duck.describe()
    assert info.resident_bytes > make_info().resident_bytes
    assert info == make_info(resident_bytes=info.resident_bytes)
    assert duck.health() == "SERVING"
