"""A lane's stages, however late the GPU and the ducks are: serial bits, or an error."""

from dataclasses import replace

import numpy as np
import pytest

from testing.gpu.fake import OrderError
from testing.gpu.lanes import HIDDEN, MAX_ROWS, NUM_LAYERS, TwoLanes, serial_step
from vllm_duck.errors import DuckShapeError

SEEDS = range(20)


def _inputs(*, seed=0, rows=(3, 2)):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, HIDDEN)).astype(np.float32) for n in rows]


@pytest.mark.parametrize("seed", range(60))
def test_two_lanes_give_the_bits_of_the_serial_step(seed):
    lanes = TwoLanes(seed)
    for step in range(2):
        inputs, bias = _inputs(seed=step), 0.25 * step
        got, want = lanes.step(inputs, bias), serial_step(inputs, bias)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        assert lanes.gpu.num_captures == 2 * (NUM_LAYERS + 1), "a step captured again"
    assert sorted(lanes.ducks.requests) == sorted([*range(NUM_LAYERS)] * 4)


def test_another_number_of_rows_is_another_graph():
    lanes = TwoLanes(0)
    lanes.step(_inputs(), 0.0)
    inputs = _inputs(rows=(1, 2))
    got, want = lanes.step(inputs, 0.0), serial_step(inputs, 0.0)
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate(want))
    assert lanes.gpu.num_captures == 3 * (NUM_LAYERS + 1)


@pytest.mark.parametrize("rows", [0, MAX_ROWS + 1])
def test_rows_that_do_not_fit_are_refused(rows):
    runner = TwoLanes(0).runners[0]
    with pytest.raises(DuckShapeError, match=f"1 to {MAX_ROWS} rows, got {rows}"):
        runner.enter(np.zeros((rows, HIDDEN), np.float32), np.zeros(1, np.float32))
    with pytest.raises(DuckShapeError, match=f"1 to {MAX_ROWS} rows, got {rows}"):
        runner.stage0(0, rows)


def test_a_lane_has_one_stage_in_flight():
    lanes = TwoLanes(0)
    lanes.runners[0].stage0(0, 1)
    with pytest.raises(AssertionError, match="in flight"):
        lanes.runners[0].stage0(1, 1)
    with pytest.raises(AssertionError, match="in flight"):
        lanes.runners[0].enter(*_inputs(rows=(1, 1)))


@pytest.mark.parametrize("seed", SEEDS)
def test_sending_before_the_flag_is_caught(seed, monkeypatch):
    lanes = TwoLanes(seed)
    monkeypatch.setattr(lanes.gpu, "is_raised", lambda flag, value: True)
    with pytest.raises(OrderError, match="reads lane0.request, which nobody wrote"):
        lanes.step(_inputs(), 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_sending_before_the_flag_is_caught_when_all_had_ended(seed, monkeypatch):
    """The kernels have run in time, by luck: the host did not know."""
    lanes = TwoLanes(seed)

    def look(flag, value):
        lanes.gpu.run_all()
        return True

    monkeypatch.setattr(lanes.gpu, "is_raised", look)
    with pytest.raises(OrderError, match="host reads lane0.request, but did not wait"):
        lanes.step(_inputs(), 0.0)


def _two_layers_of_one_lane(lanes):
    """The other lane's first layer is in flight meanwhile, however quick the GPU is."""
    lanes.enter(_inputs(), 0.0)
    first, second = lanes.runners
    ours, theirs = first.stage0(0, 3), second.stage0(0, 2)
    ours.wait()
    first.stage0(1, 3)
    theirs.wait()
    lanes.gpu.run_all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "shared", ["request", "topk_ids", "topk_weights", "total", "flag"]
)
def test_lanes_that_share_memory_are_caught(seed, shared):
    lanes = TwoLanes(seed)
    theirs = getattr(lanes.memories[0], shared)
    lanes.memories[1] = replace(lanes.memories[1], **{shared: theirs})
    lanes.runners[1] = lanes.runner(1, lanes.gpu)
    with pytest.raises(OrderError, match="did not wait|was awaited|nobody wrote"):
        _two_layers_of_one_lane(lanes)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_with_memory_of_their_own_pass_the_same(seed):
    _two_layers_of_one_lane(TwoLanes(seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_run", range(5))
def test_metadata_that_changes_under_a_graph_is_caught(seed, num_run):
    """Whether its kernel has read it (2 or more have run) or not."""
    lanes = TwoLanes(seed)
    lanes.gpu.host_write(lanes.caches[0], np.zeros(HIDDEN, np.float32))
    runner, metadata = lanes.runners[0], lanes.memories[0].metadata
    runner.enter(_inputs()[0], np.zeros(1, np.float32))
    runner.stage0(0, 3)
    for _ in range(num_run):
        lanes.gpu.run_one()

    def change():
        lanes.gpu.host_write(metadata, np.ones(1, np.float32))
        lanes.gpu.run_all()

    with pytest.raises(OrderError, match="lane0.metadata, but did not wait"):
        change()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_on_streams_of_their_own_are_caught(seed):
    """Nothing would order what they do to the shared caches."""
    lanes = TwoLanes(seed)
    lanes.runners[1] = lanes.runner(1, _OnItsOwn(lanes.gpu))
    with pytest.raises(OrderError, match="cache0, but did not wait for"):
        _two_layers_of_one_lane(lanes)


class _OnItsOwn:
    """The GPU with another stream."""

    def __init__(self, gpu):
        self._gpu = gpu

    def __getattr__(self, name):
        return getattr(self._gpu, name)

    def launch(self, graph):
        self._gpu.launch(graph, "another")


def test_a_graph_of_memory_that_is_gone_is_caught():
    lanes = TwoLanes(0)
    lanes.step(_inputs(), 0.0)
    lanes.gpu.free(lanes.memories[0].total)
    with pytest.raises(OrderError, match="lane0.total, which is freed"):
        lanes.step(_inputs(), 0.0)
