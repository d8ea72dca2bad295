"""The sums of a step in two lanes, from the times of its stages."""

import pytest

from vllm_duck.executor.duck import CallTimes
from vllm_duck.models.cpu.layer import DoneLayer
from vllm_duck.spec_decode.lanes.times import LaneTimes, Stages, StepRecord, overlap_of

US = 1000
HOST_US, COMPUTE_US, LINK_US = 100, 60, 30
SENT = CallTimes(0, COMPUTE_US + LINK_US, COMPUTE_US, LINK_US)


def _make_record(calls):
    """Two lanes, a layer for each of the calls; None is a dense layer."""
    lanes, now = [LaneTimes(), LaneTimes()], 0
    for call in calls:
        for lane in lanes:
            end = now + HOST_US * US
            lane.stages.append(Stages(now, end, end, end, call))
            now = end
    return StepRecord(tuple(lanes), None)


def test_stage_1_is_the_compute_and_the_quickest_way():
    step = overlap_of(_make_record([SENT, SENT._replace(link_us=40)]))
    assert step.s0_s == pytest.approx(4 * HOST_US / 1e6)
    assert step.s1_s == pytest.approx(4 * (COMPUTE_US + LINK_US) / 1e6)
    assert step.ideal_s == pytest.approx((4 * HOST_US + COMPUTE_US + LINK_US) / 1e6)


@pytest.mark.parametrize("calls", [[SENT, None, SENT], [SENT, None], [None, SENT]])
def test_a_dense_layer_is_work_of_the_host_alone(calls):
    """As with moe_layer_freq 2: it takes no way to the ducks, not a way of 0 us."""
    step = overlap_of(_make_record(calls))
    num_calls = 2 * sum(call is not None for call in calls)
    s0_us, s1_us = 2 * len(calls) * HOST_US, num_calls * (COMPUTE_US + LINK_US)
    assert step.s0_s == pytest.approx(s0_us / 1e6)
    assert step.s1_s == pytest.approx(s1_us / 1e6)
    assert step.ideal_s == pytest.approx((s0_us + s1_us / num_calls) / 1e6)


def test_a_dense_layer_asks_no_duck():
    assert DoneLayer(None).wait().call is None
