"""The native stream in front of the real kernel: the bits of the Python path."""

import numpy as np
import pytest

from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import NATIVE, calling, replies_of
from vllm_duck.errors import DuckShapeError
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.transports import choose_transport
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.executor.wire.security import ServerSecurity

SHARDS = (Shard(0, 64, 0, 4), Shard(64, 160, 0, 2), Shard(64, 160, 2, 4))


@pytest.fixture
def moes(bf16_checkpoint):
    return [
        ShardMoe(
            load_shard(bf16_checkpoint, shard),
            MoeKernel(num_threads=2, pin=False),
        )
        for shard in SHARDS
    ]


@pytest.fixture
def infos(moes):
    return [moe.info for moe in moes]


@pytest.fixture
def start(moes):
    servers = []

    def start_all(transport):
        for moe in moes:
            server = choose_transport(transport, has_tls=False).transport.make_server(
                moe,
                listen="localhost:0",
                security=ServerSecurity(),
                max_message_bytes=1 << 20,
            )
            server.start()
            servers.append(server)
        return [server.endpoint for server in servers[-len(moes) :]]

    yield start_all
    for server in servers:
        server.stop(0)


@pytest.mark.parametrize("transport", [NATIVE])
@pytest.mark.parametrize("reply_dtype", ["bf16", "fp32"])
def test_both_transports_give_the_same_bits(start, infos, transport, reply_dtype):
    # 100 rows are computed in the second thread, 3 in the first.
    requests = [make_request(rows, seed=rows) for rows in (1, 3, 100)]
    with (
        calling(
            "grpcio", start("grpcio"), reply_dtype=reply_dtype, infos=infos
        ) as python,
        calling(
            transport, start(transport), reply_dtype=reply_dtype, infos=infos
        ) as native,
    ):
        for request in requests:
            expected, got = python.send(request), native.send(request)
            np.testing.assert_array_equal(got.wait().total, expected.wait().total)
            for ours, theirs in zip(replies_of(got), replies_of(expected), strict=True):
                assert ours.partial.tobytes() == theirs.partial.tobytes()


@pytest.mark.parametrize("transport", [NATIVE, "grpcio"])
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_idx": 0}, "layer_idx must be one of .*, got 0"),
        ({"hidden_size": 64}, "hidden must have size 32 on axis 1, got 64"),
        ({"num_experts": 9}, r"topk_ids must be in \[0, 4\), got \d in row"),
    ],
)
def test_a_request_that_does_not_fit_the_model_is_refused_and_the_next_one_served(
    start, infos, transport, changes, match
):
    with calling(transport, start(transport), infos=infos) as fan_out:
        bad = fan_out.send(make_request(20, **changes))
        with pytest.raises(DuckShapeError, match=match):
            bad.wait()
        assert fan_out.send(make_request()).wait().total.shape == (3, 32)
