"""All ducks as one: summed in duck order, encoded once, refused if they do not fit."""

import numpy as np
import pytest

from testing.ducks.bf16 import f32_to_bf16
from testing.ducks.in_process import InProcessDuck
from testing.ducks.mini_model import make_info, make_request, make_summary
from testing.ducks.wire_peers import replies_of
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckConfigError, DuckProtocolError, DuckUnavailable
from vllm_duck.executor import fleet as fleet_module
from vllm_duck.executor.duck import MoeReply, Shard
from vllm_duck.executor.fleet import Fleet, check_ducks
from vllm_duck.executor.grpcio.client import GrpcDuck
from vllm_duck.executor.grpcio.fan_out import PythonFanOut
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.wire.bf16 import bf16_to_f32

HALVES = (Shard(0, 80, 0, 4), Shard(80, 160, 0, 4))


def _constant(value):
    def function(request, reply_dtype):
        partial = np.full(request.hidden.shape, value, np.float32)
        return partial if reply_dtype == "fp32" else f32_to_bf16(partial)

    return function


def _ducks(*infos, values=None):
    values = values or [1.0] * len(infos)
    return [
        InProcessDuck(_constant(value), info, name=f"duck{index}")
        for index, (info, value) in enumerate(zip(infos, values, strict=True))
    ]


@pytest.fixture
def two_servers():
    servers = [
        DuckServer(_constant(value), make_info(shard), listen="127.0.0.1:0")
        for value, shard in zip((1.0, 2.0), HALVES, strict=True)
    ]
    for server in servers:
        server.start()
    yield servers
    for server in servers:
        server.stop(0)


def _endpoints(servers):
    return [server.endpoint for server in servers]


@pytest.mark.parametrize("transport", ["auto", "grpcio"])
@pytest.mark.parametrize("reply_dtype", ["bf16", "fp32"])
def test_partials_of_real_ducks_are_summed(two_servers, reply_dtype, transport):
    with Fleet.connect(
        _endpoints(two_servers),
        expect=make_summary(),
        reply_dtype=reply_dtype,
        transport=transport,
    ) as fleet:
        total = fleet.send(make_request()).wait().total
    assert total.dtype == np.float32
    np.testing.assert_array_equal(total, np.full((3, 32), 3.0))


def test_partials_are_summed_in_duck_order():
    # In another order, fp32 gives 0 or 2.
    values = [2.0**25, 1.0, -(2.0**25), 1.0]
    ducks = _ducks(*[make_info()] * 4, values=values)
    total = PythonFanOut(ducks).send(make_request()).wait().total
    np.testing.assert_array_equal(total, np.ones((3, 32)))


def test_the_sum_of_one_duck_is_fresh_and_writable(two_servers):
    fleet = PythonFanOut(_ducks(make_info(), values=[5.0]))
    pending = fleet.send(make_request())
    pending.wait().total[:] = 0
    np.testing.assert_array_equal(pending.wait().total, np.full((3, 32), 5.0))


def test_bf16_partials_of_in_process_ducks_are_widened():
    duck = InProcessDuck(_constant(1.5), make_info(), reply_dtype="bf16")
    total = PythonFanOut([duck]).send(make_request()).wait().total
    np.testing.assert_array_equal(total, np.full((3, 32), 1.5))


def test_remote_and_in_process_ducks_mix(two_servers):
    remote = [GrpcDuck(endpoint) for endpoint in _endpoints(two_servers)]
    fan_out = PythonFanOut([*remote, *_ducks(make_info(), values=[4.0])])
    total = fan_out.send(make_request()).wait().total
    fan_out.close()
    np.testing.assert_array_equal(total, np.full((3, 32), 7.0))


def test_replies_are_in_duck_order():
    fleet = PythonFanOut(_ducks(make_info(), make_info(), values=[1.0, 2.0]))
    replies = replies_of(fleet.send(make_request()))
    assert [reply.partial[0, 0] for reply in replies] == [1.0, 2.0]


def test_statistics_are_medians_of_each_duck():
    class Scripted(InProcessDuck):
        def send(self, request):
            times = self.times.pop()
            partial = np.zeros((1, 1), np.float32)

            class Ready:
                def is_done(self):
                    return True

                def wait(self):
                    queue_us, compute_us, rtt_us = times
                    return MoeReply(partial, queue_us, compute_us, rtt_us)

            return Ready()

    duck = Scripted(_constant(0), make_info(), name="a")
    duck.times = [(1, 10, 100), (2, 20, 200), (9, 90, 900)]
    fleet = PythonFanOut([duck])
    assert fleet.statistics()[0].num_calls == 0
    for _ in range(3):
        fleet.send(make_request()).wait()
    (figures,) = fleet.statistics()
    assert (figures.name, figures.num_calls) == ("a", 3)
    assert (figures.queue_us, figures.compute_us, figures.rtt_us) == (2, 20, 200)


def test_a_fleet_that_fits_passes_the_check():
    infos = [make_info(shard) for shard in HALVES]
    assert check_ducks(_ducks(*infos), make_summary()) == infos
    assert check_ducks(_ducks(*infos)) == infos


def test_ducks_may_all_hold_the_experts_requantised():
    infos = [make_info(shard, weight_format="int4-group32") for shard in HALVES]
    assert check_ducks(_ducks(*infos), make_summary()) == infos


@pytest.mark.parametrize("expect", [make_summary(), None])
@pytest.mark.parametrize("other", ["int8-group128", "bf16"])
def test_ducks_of_two_weight_formats_are_refused(expect, other):
    infos = [
        make_info(HALVES[0], weight_format=other),
        make_info(HALVES[1], weight_format="int4-group32"),
    ]
    match = f"duck duck1 holds int4-group32, duck duck0 {other}; split or serve all"
    with pytest.raises(DuckConfigError, match=match):
        check_ducks(_ducks(*infos), expect)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"model_fingerprint": "beef"},
            "duck duck1 has fingerprint beef, this host has f00d; start all ducks and",
        ),
        (
            {"layer_ids": (1, 2)},
            r"duck1 has layer_ids \(1, 2\), this host has \(1, 2, 3\)",
        ),
        ({"hidden_size": 64}, "duck1 has hidden_size 64, this host has 32"),
        (
            {"weight_format": "e4m3-block128"},
            "duck1 has weight_format e4m3-block128, this host has bf16",
        ),
    ],
)
def test_a_duck_of_another_model_is_refused_with_both_values(changes, match):
    infos = [make_info(HALVES[0]), make_info(HALVES[1], **changes)]
    with pytest.raises(DuckConfigError, match=match):
        check_ducks(_ducks(*infos), make_summary())


def test_without_a_host_model_the_first_duck_is_the_measure():
    infos = [make_info(HALVES[0]), make_info(HALVES[1], model_fingerprint="beef")]
    match = "duck duck1 has fingerprint beef, duck duck0 has f00d"
    with pytest.raises(DuckConfigError, match=match):
        check_ducks(_ducks(*infos))


def test_a_duck_of_another_protocol_version_is_refused_with_both():
    infos = [make_info(HALVES[0]), make_info(HALVES[1], protocol_version=99)]
    match = "duck duck1 speaks protocol version 99, this host 2; install the same"
    with pytest.raises(DuckProtocolError, match=match):
        check_ducks(_ducks(*infos), make_summary())


@pytest.mark.parametrize(
    ("shards", "match"),
    [
        (HALVES[:1], r"1 shards leave a gap: nobody holds columns \[80, 160\)"),
        (
            (HALVES[0], HALVES[0], HALVES[1]),
            r"overlap: duck duck0 and duck duck1 both hold columns \[0, 80\)",
        ),
        ((HALVES[0], Shard(80, 176, 0, 4)), "duck duck1 holds .*176.*, but the model"),
    ],
)
def test_ducks_that_do_not_tile_are_refused_by_name(shards, match):
    ducks = _ducks(*[make_info(shard) for shard in shards])
    with pytest.raises(DuckConfigError, match=match):
        check_ducks(ducks, make_summary())


def test_a_fleet_of_nobody_is_refused():
    with pytest.raises(DuckConfigError, match="needs at least one duck; set duck.end"):
        check_ducks([])


def test_one_duck_that_is_down_is_named(two_servers):
    first, second = two_servers
    second.stop(0)
    match = f"duck {second.endpoint} cannot be reached"
    with pytest.raises(DuckUnavailable, match=match):
        Fleet.connect(_endpoints(two_servers))


def test_connect_waits_for_a_duck_that_comes_up_late(tmp_path):
    server = None

    def start_late(seconds):
        nonlocal server
        if server is None:
            server = DuckServer(
                _constant(1.0), make_info(), listen=f"unix:{tmp_path}/duck"
            )
            server.start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module.time, "sleep", start_late)
        with Fleet.connect([f"unix:{tmp_path}/duck"], connect_s=WAIT_S) as fleet:
            fleet.send(make_request()).wait()
    server.stop(0)


@pytest.mark.parametrize("transport", ["auto", "grpcio"])
def test_a_duck_that_dies_is_named_by_the_calls_in_flight_and_later(
    two_servers, transport
):
    with Fleet.connect(_endpoints(two_servers), transport=transport) as fleet:
        fleet.send(make_request()).wait()
        two_servers[1].stop(0)
        with pytest.raises(DuckUnavailable, match=two_servers[1].endpoint):
            fleet.send(make_request()).wait()
        with pytest.raises(DuckUnavailable, match=two_servers[1].endpoint):
            fleet.send(make_request()).wait()


def test_widened_partials_are_exact():
    duck = InProcessDuck(lambda request, dtype: request.hidden, make_info())
    request = make_request()
    total = PythonFanOut([duck]).send(request).wait().total
    np.testing.assert_array_equal(total, bf16_to_f32(request.hidden))


def test_an_in_process_duck_that_is_closed_is_unavailable():
    fleet = PythonFanOut(_ducks(make_info()))
    fleet.close()
    with pytest.raises(DuckUnavailable, match="duck duck0: the client was closed"):
        fleet.send(make_request())
