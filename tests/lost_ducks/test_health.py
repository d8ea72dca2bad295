"""What the worker says of lost ducks is what the API server reads."""

import threading
from http import HTTPStatus

import pytest

from testing.waiting import WAIT_S, wait_until
from vllm_duck.lost_ducks.health import (
    Health,
    HealthBoard,
    HealthFile,
    LostDuck,
    health_file,
)
from vllm_duck.lost_ducks.lookout import Lookout


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "health")


@pytest.fixture
def board(path):
    return HealthBoard(HealthFile(path))


def _read(path):
    return health_file(path).read()


def test_nothing_said_is_well(path):
    assert HealthFile(path).read() == Health()
    assert Health().http_status is HTTPStatus.OK


def test_a_lost_duck_is_named_until_it_is_back(board, path):
    board.lost("a:1", "Connection refused")
    found = _read(path)
    assert (found.status, found.http_status) == ("recovering", HTTPStatus.OK)
    assert [(duck.name, duck.reason) for duck in found.lost] == [
        ("a:1", "Connection refused")
    ]
    body = found.answer()
    assert body["status"] == "recovering"
    assert body["ducks"][0]["lost_s"] >= 0
    assert "error" not in body
    board.back("a:1")
    assert _read(path) == Health()


def test_a_duck_lost_for_another_reason_has_been_lost_as_long(board, path):
    board.lost("a:1", "reset")
    (first,) = _read(path).lost
    board.lost("a:1", "refused")
    assert _read(path).lost == (LostDuck("a:1", first.since_s, "refused"),)


def test_after_a_failed_step_it_is_degraded_until_all_ducks_answer(board, path):
    board.lost("a:1", "reset")
    board.step_failed("duck a:1 has been lost for 60.0 s")
    found = _read(path)
    assert found.http_status is HTTPStatus.SERVICE_UNAVAILABLE
    assert found.answer()["error"] == "duck a:1 has been lost for 60.0 s"
    assert board.is_degraded
    board.looked({"b:1": "refused"})
    assert [duck.name for duck in _read(path).lost] == ["b:1"]
    assert board.is_degraded
    board.looked({})
    assert _read(path) == Health()
    assert not board.is_degraded


def test_more_ducks_than_there_is_room_for_are_cut_short(board, path):
    board.looked({f"duck{i}:7100": "x" * 5000 for i in range(200)})
    lost = _read(path).lost
    assert 10 < len(lost) < 200
    assert [duck.name for duck in lost] == [f"duck{i}:7100" for i in range(len(lost))]


def test_the_file_is_read_whole_while_it_is_written(board, path):
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            board.lost("a", "x" * 1000)
            board.back("a")

    thread = threading.Thread(target=write)
    thread.start()
    reader = HealthFile(path)
    try:
        seen = {len(reader.read().lost) for _ in range(2000)}
    finally:
        is_over.set()
        thread.join()
    assert seen <= {0, 1}


def test_a_file_whose_path_is_gone_still_carries_the_news(board, path, tmp_path):
    reader = health_file(path)
    (tmp_path / "health").unlink()
    board.lost("a:1", "reset")
    assert reader.read().status == "recovering"


def test_a_damaged_file_is_an_error(path):
    file = HealthFile(path)
    with open(path, "r+b") as damaged:
        damaged.write(b"\1\2\3\4\5\0\0\0xxxxx")
    with pytest.raises(RuntimeError, match="damaged"):
        file.read()


class _Ducks:
    """As much of a fleet as a lookout asks."""

    def __init__(self):
        self.gone = {}
        self.num_looks = 0
        # Cleared: a look does not end.
        self.may_answer = threading.Event()
        self.may_answer.set()

    def missing(self):
        self.num_looks += 1
        found = dict(self.gone)
        assert self.may_answer.wait(WAIT_S)
        return found


@pytest.fixture
def ducks():
    return _Ducks()


@pytest.fixture
def lookout(board, ducks):
    lookout = Lookout(board, ducks.missing)
    yield lookout
    lookout.stop()


def test_the_lookout_asks_until_all_ducks_are_back(lookout, board, ducks, path):
    ducks.gone = {"a:1": "refused"}
    lookout.step_failed("duck a:1 is lost")
    wait_until(lambda: _read(path).lost)
    assert _read(path).status == "degraded"
    ducks.gone = {}
    wait_until(lambda: _read(path).status == "ok")
    num_looks = ducks.num_looks
    assert not board.is_degraded
    assert ducks.num_looks == num_looks


def test_a_step_that_fails_during_a_look_is_not_cleared_by_it(
    lookout, board, ducks, path
):
    ducks.may_answer.clear()
    lookout.step_failed("the first")
    wait_until(lambda: ducks.num_looks == 1)
    lookout.step_failed("the second")
    ducks.gone = {"a:1": "refused"}
    ducks.may_answer.set()
    wait_until(lambda: _read(path).lost)
    assert _read(path).error == "the second"
    ducks.gone = {}
    wait_until(lambda: not board.is_degraded)


def test_without_a_failed_step_nobody_is_asked(lookout, ducks):
    lookout.stop()
    assert not ducks.num_looks
