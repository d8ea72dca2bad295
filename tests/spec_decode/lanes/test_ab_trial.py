"""The quicker of two ways is found, by size, and looked for again."""

import pytest

from vllm_duck.spec_decode.lanes.ab_trial import NUM_TRIALS, RETRY_AFTER, ABTrial


def takes_first(ways, size):
    trial = ways.next_trial(size)
    return ways.is_first_better(size) if trial is None else trial


def run(ways, num_steps, *, first_s, second_s, size=2):
    """Which steps went the first way."""
    taken = []
    for _ in range(num_steps):
        is_first = takes_first(ways, size)
        seconds = first_s if is_first else second_s
        ways.observe(size, is_first=is_first, seconds=seconds)
        taken.append(is_first)
    return taken


@pytest.mark.parametrize(
    ("first_s", "second_s", "expected"), [(1.0, 2.0, True), (2.0, 1.0, False)]
)
def test_both_are_tried_and_the_better_is_taken(first_s, second_s, expected):
    taken = run(ABTrial(), 100, first_s=first_s, second_s=second_s)
    assert taken[0]
    assert sum(taken[: 2 * NUM_TRIALS]) == NUM_TRIALS
    assert set(taken[2 * NUM_TRIALS :]) == {expected}


def test_sizes_are_judged_apart():
    ways = ABTrial()
    run(ways, 50, first_s=1.0, second_s=2.0, size=2)
    run(ways, 50, first_s=2.0, second_s=1.0, size=600)
    assert takes_first(ways, 2)
    assert not takes_first(ways, 600)
    # One class: 512 to 1023.
    assert not takes_first(ways, 900)


def test_one_hiccup_changes_nothing():
    ways = ABTrial()
    run(ways, 50, first_s=1.0, second_s=2.0)
    ways.observe(2, is_first=True, seconds=100.0)
    assert takes_first(ways, 2)


def test_steps_that_teach_nothing_do_not_stop_the_clock():
    """A step that cannot be divided is neither way."""
    ways = ABTrial()
    run(ways, 50, first_s=1.0, second_s=2.0)
    trials = [ways.next_trial(2) for _ in range(2 * RETRY_AFTER)]
    assert trials.count(None) == 2 * (RETRY_AFTER - NUM_TRIALS)


def test_a_change_of_the_times_is_noticed():
    ways = ABTrial()
    run(ways, RETRY_AFTER, first_s=1.0, second_s=2.0)
    taken = run(ways, RETRY_AFTER, first_s=3.0, second_s=2.0)
    assert not any(taken[2 * NUM_TRIALS : -NUM_TRIALS])
    # And the retries are few.
    taken = run(ways, 10 * RETRY_AFTER, first_s=3.0, second_s=2.0)
    assert 0 < sum(taken) <= 10 * NUM_TRIALS
