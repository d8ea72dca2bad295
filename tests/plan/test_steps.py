"""What a fleet would do: by hand where that is short, and the ways it must bend."""

from dataclasses import replace

import pytest

from vllm_duck.errors import DuckConfigError
from vllm_duck.plan.machines import CALL_S, GPUS, Fleet, find_host
from vllm_duck.plan.prediction import as_table, predict
from vllm_duck.plan.sizes import BF16_BYTES, FP8_BYTES, INT4_BYTES
from vllm_duck.plan.steps import Given, Planner

FLEET = Fleet(32, duck_gbs=25, duck_gflops=192, link_gbps=2.5, host_gbps=100)


@pytest.fixture
def planner(sizes) -> Planner:
    return Planner(sizes, GPUS["rtx5090"], FLEET, FP8_BYTES, FP8_BYTES, 0.87)


def test_the_reference_engine_s_stage_times_give_its_speed(planner):
    """32 N100 and an RTX 5090: 15.3 tokens a second at an acceptance of 0.87."""
    given = Given(host_s=0.71e-3, ducks_s=0.92e-3)
    step = replace(planner, given=given).step(1)
    assert step.tokens == pytest.approx(1.87)
    # The longer stage of two lanes in each of 58 layers.
    assert step.moe_s == pytest.approx(58 * 2 * 0.92e-3)
    assert step.tok_s == pytest.approx(15.3, rel=0.25)


def test_a_lane_s_stages_are_bytes_over_bandwidth(planner):
    stages = planner.stages(1)
    expert = 3 * 7168 * 2048 * FP8_BYTES
    assert stages.ducks_s == pytest.approx(8 * expert / 32 / 20e9 + 30e-6)
    context = 4096 * 132 + 2048 * 656
    host = planner.sizes.moe_host_bytes(FP8_BYTES) + context
    assert stages.host_s == pytest.approx(host / (1792e9 * 0.85) + 90e-6)
    assert stages.calls_s == pytest.approx(32 * CALL_S)
    assert stages.there_s == pytest.approx(14400 / (2.5e9 / 8 * 0.94))


def test_many_rows_take_their_arithmetic(planner):
    rows = 2048
    flops = rows * 8 * 2 * 3 * 7168 * 2048 / 32
    assert planner.stages(rows).ducks_s == pytest.approx(flops / (192e9 * 0.8) + 30e-6)


def test_lanes_take_the_busiest_or_the_way_round(planner):
    one = planner.stages(1)
    assert planner.layer_s(1) == one.chain_s
    assert planner.layer_s(2) == max(one.chain_s, 2 * one.ducks_s)
    slow = replace(planner, given=Given(host_s=1e-3, ducks_s=4e-3))
    assert slow.layer_s(2) == pytest.approx(8e-3)
    assert slow.bottleneck(2) == "the ducks"
    even = replace(planner, given=Given(host_s=2e-3, ducks_s=2e-3))
    assert even.layer_s(2) == pytest.approx(4e-3)
    assert even.bottleneck(2) == "the GPU"


def test_a_cpu_host_s_thread_also_drives_the_sockets(sizes, planner):
    cpu = replace(planner, host=find_host(None, 400, None))
    stages = cpu.stages(1)
    busiest = cpu.busy(stages)["the host"]
    assert busiest == stages.host_s + stages.calls_s
    assert cpu.layer_s(2) == pytest.approx(2 * busiest)


def test_a_narrow_port_of_the_host_is_named(planner):
    narrow = replace(planner, fleet=replace(FLEET, host_gbps=1))
    assert narrow.bottleneck(2).startswith("the host's port")
    assert narrow.stages(1).there_s == pytest.approx(32 * 14400 / (1e9 / 8 * 0.94))


def test_more_of_anything_is_never_slower(planner):
    def both(other):
        return other.step(1).tok_s, other.prefill_tok_s()

    base = both(planner)
    for other in (
        replace(planner, fleet=replace(FLEET, duck_gbs=50, duck_gflops=400)),
        replace(planner, fleet=replace(FLEET, link_gbps=10)),
        replace(planner, expert_bytes=INT4_BYTES),
        replace(planner, host=GPUS["h200"]),
        replace(planner, acceptance=0.95),
    ):
        assert all(a >= b for a, b in zip(both(other), base, strict=True))
    assert both(replace(planner, host_bytes=BF16_BYTES))[0] <= base[0]


def test_the_best_number_of_drafts_is_one_of_all(planner):
    steps = [planner.step(count) for count in range(8)]
    assert planner.best_step() == max(steps, key=lambda step: step.tok_s)
    never = replace(planner, acceptance=0.0)
    assert never.best_step().num_drafts == 0


def test_a_longer_prompt_takes_longer(planner):
    times = [planner.prefill_s(count) for count in (1, 100, 2048, 2049, 32_000)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_a_prediction_says_all_of_it_once(planner):
    found = predict(planner, None)
    assert found.step == planner.best_step()
    assert found.duck_bytes == pytest.approx(665.3e9 / 32 * 1.03 + 0.1e9, rel=1e-3)
    assert [change.what for change in found.changes] == [
        "one more duck",
        "links of 5 Gb/s",
        "one more draft",
        "int4 experts",
    ]
    table = as_table(found)
    for text in ("each of 32 ducks", "255,088 tokens", "held up by", "behind 32,000"):
        assert text in table
    assert found.to_json()["card"]["num_tokens"] == 255_088


def test_hosts_and_drafts_that_are_not_there_are_refused(planner):
    for name, gbs in ((None, None), ("rtx5090", 400.0)):
        with pytest.raises(DuckConfigError, match="--host NAME of a GPU, or"):
            find_host(name, gbs, None)
    with pytest.raises(DuckConfigError, match="one of rtx3090, .* got gtx1080"):
        find_host("gtx1080", None, None)
    dims = replace(planner.sizes.dims, num_nextn_predict_layers=0)
    without = replace(planner, sizes=replace(planner.sizes, dims=dims))
    assert without.best_step().num_drafts == 0
    with pytest.raises(DuckConfigError, match="--drafts 2 is more than 0"):
        predict(without, 2)
