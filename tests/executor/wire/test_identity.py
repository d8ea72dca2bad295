"""No row goes to another duck than the one that was checked, on any connection."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from testing.ducks.echo import echo, echo_compute
from testing.ducks.mini_model import NUM_COLUMNS, make_info, make_request
from testing.ducks.wire_peers import BOTH_CLIENTS, NATIVE, SERVERS, calling
from testing.waiting import wait_until
from vllm_duck.errors import DuckProtocolError, DuckTransportError
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.wire.bf16 import bf16_to_f32
from vllm_duck.executor.wire.identity import identity_of, mismatch

MINE = make_info()
# Each differs in one thing from the duck that was checked, and what the error says.
OTHERS = {
    "columns": (
        replace(MINE, shard=Shard(0, 80, 0, 4)),
        f"expected columns=0:{NUM_COLUMNS}, got columns=0:80",
    ),
    "experts": (
        replace(MINE, shard=Shard(0, NUM_COLUMNS, 2, 4)),
        "expected experts=0:4, got experts=2:4",
    ),
    "layers": (replace(MINE, layer_ids=(1, 2)), "expected layers=1-3, got layers=1-2"),
    "weight format": (
        replace(MINE, weight_format="int8-group128"),
        "expected format=bf16, got format=int8-group128",
    ),
    "checkpoint": (
        replace(MINE, model_fingerprint="beef"),
        "expected model=f00d, got model=beef",
    ),
    "protocol": (
        replace(MINE, protocol_version=99),
        "expected protocol=2, got protocol=99",
    ),
}


class _Serving:
    """A duck at one endpoint that can be swapped for another one."""

    def __init__(self, kind, endpoint):
        self._kind = kind
        self.endpoint = endpoint
        self._server = None
        self.calls = []

    def _compute(self, request, reply_dtype):
        self.calls.append(request)
        return echo(request, reply_dtype)

    def swap(self, info):
        self.stop()
        if self._kind == "native":
            from vllm_duck.executor.native.server import NativeDuckServer

            self._server = NativeDuckServer(echo_compute(), info, listen=self.endpoint)
        else:
            self._server = DuckServer(self._compute, info, listen=self.endpoint)
        self._server.start()

    def stop(self):
        if self._server is not None:
            self._server.stop(0)
            self._server = None


@pytest.fixture(params=SERVERS)
def duck(request, tmp_path):
    serving = _Serving(request.param, f"unix:{tmp_path}/duck")
    serving.swap(MINE)
    yield serving
    serving.stop()


def _check(fan_out, seed=0):
    request = make_request(seed=seed)
    expected = bf16_to_f32(request.hidden)
    np.testing.assert_array_equal(fan_out.send(request).wait().total, expected)


@contextmanager
def _refused(match):
    with pytest.raises(DuckProtocolError, match=match) as caught:
        yield
    assert "start the duck that belongs at this endpoint" in str(caught.value)


@pytest.mark.parametrize("client", BOTH_CLIENTS)
@pytest.mark.parametrize("other", OTHERS)
def test_a_duck_swapped_between_the_check_and_the_first_call_is_refused(
    duck, client, other
):
    info, match = OTHERS[other]
    transport = "auto" if client == "native" else "grpcio"
    with Fleet.connect([duck.endpoint], transport=transport) as fleet:
        duck.swap(info)
        for seed in range(2):
            with _refused(f"duck {duck.endpoint} is not the one .*: {match};"):
                fleet.send(make_request(seed=seed)).wait()
    assert not duck.calls


@pytest.mark.parametrize("client", [NATIVE])
@pytest.mark.parametrize("other", OTHERS)
def test_a_duck_swapped_between_two_calls_is_refused_and_the_right_one_taken_back(
    duck, client, other
):
    info, match = OTHERS[other]
    with Fleet.connect([duck.endpoint]) as fleet:
        for seed in range(3):
            duck.swap(MINE)
            _check(fleet, seed)
            num_calls = len(duck.calls)
            duck.swap(info)
            with _refused(match):
                fleet.send(make_request()).wait()
            assert len(duck.calls) == num_calls


def test_grpcio_goes_on_with_none_but_the_duck_of_the_start(duck):
    """Its channel reconnects to whoever is there; nothing is asked of another duck."""
    with Fleet.connect([duck.endpoint], transport="grpcio") as fleet:
        _check(fleet)
        num_calls = len(duck.calls)
        duck.swap(OTHERS["columns"][0])
        for _ in range(2):
            with pytest.raises(DuckTransportError, match=duck.endpoint):
                fleet.send(make_request()).wait()
        assert len(duck.calls) == num_calls
        duck.swap(MINE)
        wait_until(lambda: _is_served(fleet))
        _check(fleet)


def _is_served(fleet):
    try:
        fleet.send(make_request()).wait()
    except DuckTransportError:
        return False
    return True


@pytest.mark.parametrize("client", [NATIVE])
def test_requests_in_flight_are_not_sent_again_to_another_duck(duck, client):
    with calling(client, [duck.endpoint]) as fan_out:
        _check(fan_out)
        num_calls = len(duck.calls)
        duck.swap(OTHERS["weight format"][0])
        pendings = [fan_out.send(make_request(seed=seed)) for seed in range(3)]
        for pending in pendings:
            with _refused("got format=int8-group128"):
                pending.wait()
        assert len(duck.calls) == num_calls


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_what_varies_between_restarts_does_not_count(duck, client):
    transport = "auto" if client == "native" else "grpcio"
    with Fleet.connect([duck.endpoint], transport=transport) as fleet:
        duck.swap(
            replace(MINE, isa="avx2", num_threads=7, weight_bytes=1, resident_bytes=2)
        )
        _check(fleet)


@pytest.mark.parametrize("client", BOTH_CLIENTS)
def test_a_duck_that_does_not_say_who_it_is_gets_no_row(client, stock_forward):
    endpoint, seen = stock_forward
    transport = "auto" if client == "native" else "grpcio"
    with Fleet.connect([endpoint], transport=transport) as fan_out:
        match = "must open its Forward stream with its identity, protocol=2 .*, and"
        with pytest.raises(DuckProtocolError, match=match):
            fan_out.send(make_request()).wait()
    assert seen == []


@pytest.fixture
def stock_forward():
    """A server of another make: it answers at once, without the header."""
    from concurrent import futures

    import grpc

    from vllm_duck.executor.wire import codec
    from vllm_duck.executor.wire.limits import SERVICE

    seen = []

    def forward(messages, context):
        context.send_initial_metadata(())
        for message in messages:
            seen.append(message)
            yield message

    handlers = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            lambda *_: codec.encode_info(MINE)
        ),
        "Forward": grpc.stream_stream_rpc_method_handler(forward),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", seen
    server.stop(0)


def test_an_identity_is_one_line_that_names_what_must_fit():
    assert identity_of(replace(MINE, layer_ids=(1, 2, 3, 5, 7, 8))) == (
        "protocol=2 model=f00d columns=0:160 experts=0:4 layers=1-3,5,7-8 format=bf16"
    )


@pytest.mark.parametrize(
    ("got", "match"),
    [
        ("protocol=2 a=1", "expected b=2, got a=1;"),
        ("protocol=2 b=2 c=3", "expected protocol=2 b=2, got c=3;"),
        ("nonsense", "expected protocol=2 b=2, got nonsense;"),
    ],
)
def test_a_mismatch_names_both_values(got, match):
    assert match in mismatch("protocol=2 b=2", got)
