"""A shard plan tiles the model exactly, or does not exist."""

import numpy as np
import pytest

from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.weights.plan import ShardPlan


def _coverage(plan):
    count = np.zeros((plan.n_routed_experts, plan.moe_intermediate_size), int)
    for s in plan.shards:
        count[s.expert_lo : s.expert_hi, s.column_lo : s.column_hi] += 1
    return count


@pytest.mark.parametrize("num_ducks", [1, 2, 3, 5, 24, 32, 128, 200])
@pytest.mark.parametrize(("num_columns", "num_experts"), [(2048, 256), (128, 32)])
def test_an_even_plan_covers_everything_once(num_ducks, num_columns, num_experts):
    plan = ShardPlan.even(num_ducks, num_columns=num_columns, num_experts=num_experts)
    assert len(plan.shards) == num_ducks
    assert (_coverage(plan) == 1).all()
    assert all(shard.column_lo % 16 == 0 for shard in plan.shards)


def test_an_even_plan_of_the_real_model_needs_no_scale_blocks():
    plan = ShardPlan.even(32, num_columns=2048, num_experts=256)
    assert {shard.num_columns for shard in plan.shards} == {64}
    assert {shard.num_experts for shard in plan.shards} == {256}


def test_uneven_counts_differ_by_one_step_at_most():
    plan = ShardPlan.even(5, num_columns=2048, num_experts=256)
    widths = [shard.num_columns for shard in plan.shards]
    assert widths == [416, 416, 416, 400, 400]


def test_more_ducks_than_column_steps_share_out_the_experts():
    plan = ShardPlan.even(24, num_columns=128, num_experts=16)
    assert plan.shards[0] == Shard(0, 16, 0, 6)
    assert plan.shards[-1] == Shard(112, 128, 11, 16)


def test_weights_give_proportional_shares():
    plan = ShardPlan.even(3, num_columns=2048, num_experts=8, weights=[2, 1, 1])
    assert [shard.num_columns for shard in plan.shards] == [1024, 512, 512]


def test_a_tiny_weight_still_gets_a_share():
    plan = ShardPlan.even(2, num_columns=64, num_experts=1, weights=[1000, 1])
    assert [shard.num_columns for shard in plan.shards] == [48, 16]


def test_columns_that_are_no_multiple_of_the_step_go_to_the_last():
    plan = ShardPlan.even(2, num_columns=40, num_experts=1)
    assert [shard.num_columns for shard in plan.shards] == [32, 8]


def test_a_plan_survives_json():
    plan = ShardPlan.even(3, num_columns=160, num_experts=4)
    assert ShardPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("shards", "match"),
    [
        (
            [Shard(0, 32, 0, 4)],
            r"1 shards leave a gap: nobody holds columns \[32, 64\) x experts \[0, 4\)",
        ),
        (
            [Shard(0, 48, 0, 4), Shard(32, 64, 0, 4)],
            r"overlap: shard 0 and shard 1 both hold columns \[32, 48\)",
        ),
        (
            [Shard(0, 64, 0, 2), Shard(0, 64, 3, 4)],
            r"nobody holds columns \[0, 64\) x experts \[2, 3\)",
        ),
        ([Shard(0, 80, 0, 4)], r"shard 0 holds .*80.*, but the model has .*64"),
        ([Shard(0, 64, 0, 4), Shard(8, 8, 0, 4)], "shard 1 is empty"),
        ([], "0 shards leave a gap"),
    ],
)
def test_shards_that_do_not_tile_are_refused(shards, match):
    with pytest.raises(DuckConfigError, match=match):
        ShardPlan(64, 4, tuple(shards))


@pytest.mark.parametrize(
    ("num_ducks", "weights", "match"),
    [
        (0, None, "at least 1, got 0"),
        (2, [1.0], "weights must be 2 positive numbers"),
        (2, [1.0, 0.0], "weights must be 2 positive numbers"),
        (2, [1.0, float("nan")], "weights must be 2 positive numbers"),
        (9, None, "2 experts of 64 columns make at most 8 shards, got 9 ducks"),
    ],
)
def test_a_split_that_cannot_be_is_refused(num_ducks, weights, match):
    with pytest.raises(DuckConfigError, match=match):
        ShardPlan.even(num_ducks, num_columns=64, num_experts=2, weights=weights)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"moe_intermediate_size": 1}', "null", '{"shards": 3}']
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(DuckConfigError, match="a shard plan is JSON like"):
        ShardPlan.from_json(text)
