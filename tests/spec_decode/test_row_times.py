"""Times by rows: what is measured, what is between, and what is worth a trial."""

import pytest

from vllm_duck.spec_decode.row_times import NUM_TRIALS, RowTimes


def make_times(measured):
    times = RowTimes()
    for num_rows, seconds in measured.items():
        for _ in range(NUM_TRIALS):
            times.observe(num_rows, seconds)
    return times


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(2, 1.0), (4, 2.0), (3, 1.5), (1, 1.0), (8, 3.0), (100, 3.0)],
)
def test_between_measured_numbers_it_is_a_line_and_beyond_them_constant(
    num_rows, expected
):
    times = make_times({2: 1.0, 4: 2.0, 8: 3.0})
    assert times.seconds(num_rows) == pytest.approx(expected)


def test_before_anything_is_measured_it_is_nothing():
    assert RowTimes().seconds(5) == 0


def test_steps_that_took_longer_change_little():
    """Half of them in lanes where whole is quicker, and a hiccup."""
    times = RowTimes()
    for seconds in (1.0, 1.4, 1.02, 1.4, 1.01, 9.0):
        times.observe(2, seconds)
        assert times.seconds(2) < 1.05


def test_what_has_become_slower_is_noticed():
    times = make_times({2: 1.0})
    for _ in range(9):
        times.observe(2, 3.0)
    assert times.seconds(2) == 3.0


def test_large_numbers_are_known_with_their_neighbours():
    times = make_times({3: 1.0, 64: 2.0})
    assert [n for n in (2, 3, 4, 63, 64, 71, 72) if times.is_known(n)] == [3, 64, 71]


def test_who_is_asked_for_and_never_comes_is_given_up():
    times = RowTimes()
    num_asked = 0
    while not times.is_known(4):
        times.ask(4)
        num_asked += 1
    assert NUM_TRIALS < num_asked < 10


def test_the_old_figure_holds_until_there_is_a_new_one():
    times = make_times({2: 1.0, 4: 2.0})
    times.forget(4)
    assert not times.is_known(4)
    assert times.seconds(4) == 2.0
    times.observe(4, 5.0)
    assert times.seconds(4) == 5.0
