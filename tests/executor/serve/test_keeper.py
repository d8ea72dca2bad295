"""What ends by itself is started again: at once, and three times a minute at most."""

import threading

import pytest

from testing.waiting import WAIT_S, wait_until
from vllm_duck.executor.serve import keeper
from vllm_duck.executor.serve.keeper import Keeper, StartLimit


def test_three_starts_within_a_minute_and_then_one_at_a_time():
    now = [100.0]
    limit = StartLimit(clock=lambda: now[0])
    waits = []
    for _ in range(5):
        waits.append(limit.wait_s())
        now[0] += waits[-1]
        limit.started()
        now[0] += 1.0
    assert waits == [0.0, 0.0, 0.0, 57.0, 0.0]
    now[0] += keeper.WITHIN_S
    assert limit.wait_s() == 0.0


class _Processes:
    """Two that end when they are told to."""

    def __init__(self):
        self.ended = [threading.Semaphore(0) for _ in range(2)]
        self.num_starts = [0, 0]
        self.start_error = None

    def wait(self, index):
        assert self.ended[index].acquire(timeout=WAIT_S)

    def how(self, index):
        return f"process {index} ended with signal 9"

    def start(self, index):
        if self.start_error is not None:
            error, self.start_error = self.start_error, None
            # There is still none.
            self.ended[index].release()
            raise error
        self.num_starts[index] += 1


def _keep(processes):
    return Keeper(2, wait=processes.wait, how=processes.how, start=processes.start)


@pytest.fixture
def processes():
    return _Processes()


@pytest.fixture
def kept(processes):
    kept = _keep(processes)
    yield kept
    kept.begin_to_stop()
    for each in processes.ended:
        each.release()
    kept.join()


def test_only_the_one_that_ended_is_started_again(kept, processes, caplog):
    processes.ended[1].release()
    wait_until(lambda: processes.num_starts == [0, 1])
    assert kept.ends == {1: "process 1 ended with signal 9"}
    assert "process 1 ended with signal 9; starting it again at once" in caplog.text


def test_one_that_ends_over_and_over_waits(kept, processes, caplog):
    for _ in range(4):
        processes.ended[0].release()
    wait_until(lambda: "after 3 times within 60 s" in caplog.text)
    assert processes.num_starts == [3, 0]


def test_a_start_that_fails_is_tried_again(kept, processes, caplog):
    processes.start_error = OSError("no memory")
    processes.ended[0].release()
    wait_until(lambda: processes.num_starts == [1, 0])
    assert "cannot be started: no memory" in caplog.text


def test_nothing_is_started_once_it_stops(processes):
    kept = _keep(processes)
    kept.begin_to_stop()
    for each in processes.ended:
        each.release()
    kept.join()
    assert processes.num_starts == [0, 0]
