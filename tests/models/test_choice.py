"""Lanes or not: the quicker way is found, by size, and looked for again."""

from vllm_duck.models.choice import NUM_TRIALS, RETRY_AFTER, LaneChoice


def run(choice, num_steps, *, lanes_s, whole_s, num_rows=2):
    """The ways of so many steps."""
    ways = []
    for _ in range(num_steps):
        in_lanes = choice.prefers_lanes(num_rows)
        seconds = lanes_s if in_lanes else whole_s
        choice.observe(num_rows, in_lanes=in_lanes, seconds=seconds)
        ways.append(in_lanes)
    return ways


def test_both_ways_are_tried_and_the_quicker_is_taken():
    for lanes_s, whole_s in ((1.0, 2.0), (2.0, 1.0)):
        ways = run(LaneChoice(), 100, lanes_s=lanes_s, whole_s=whole_s)
        assert sum(ways[: 2 * NUM_TRIALS]) == NUM_TRIALS
        assert set(ways[2 * NUM_TRIALS :]) == {lanes_s < whole_s}


def test_the_first_step_is_in_lanes():
    assert LaneChoice().prefers_lanes(2)


def test_sizes_are_decided_apart():
    choice = LaneChoice()
    run(choice, 50, lanes_s=1.0, whole_s=2.0, num_rows=2)
    run(choice, 50, lanes_s=2.0, whole_s=1.0, num_rows=600)
    assert choice.prefers_lanes(2)
    assert not choice.prefers_lanes(600)
    # One class: 512 to 1023.
    assert not choice.prefers_lanes(900)


def test_one_hiccup_changes_nothing():
    choice = LaneChoice()
    run(choice, 50, lanes_s=1.0, whole_s=2.0)
    choice.observe(2, in_lanes=True, seconds=100.0)
    assert choice.prefers_lanes(2)


def test_a_change_of_the_times_is_noticed():
    choice = LaneChoice()
    run(choice, RETRY_AFTER, lanes_s=1.0, whole_s=2.0)
    ways = run(choice, RETRY_AFTER, lanes_s=3.0, whole_s=2.0)
    assert not any(ways[2 * NUM_TRIALS :])
    # And the retries are few.
    ways = run(choice, 10 * RETRY_AFTER, lanes_s=3.0, whole_s=2.0)
    assert 0 < sum(ways) <= 10 * NUM_TRIALS
