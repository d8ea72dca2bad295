"""The fake itself: each rule of models/cuda/device.py, broken alone."""

import numpy as np
import pytest

from testing.gpu.fake import FakeGpu, Kernel, OrderError


def _copy(source, target):
    target[...] = source


@pytest.fixture
def gpu():
    return FakeGpu(0)


def _graph(gpu, source, target, flag=None):
    return gpu.capture(lambda: gpu.start(Kernel("k", [source], [target], _copy, flag)))


def _see(gpu, flag, value=1):
    while not gpu.is_raised(flag, value):
        pass


def test_the_host_reads_what_is_behind_a_flag_it_saw(gpu):
    a, b, flag = gpu.allocate("a", 2), gpu.allocate("b", 2), gpu.allocate_flag("f")
    gpu.host_write(a, np.ones(2, np.float32))
    gpu.launch(_graph(gpu, a, b, flag))
    _see(gpu, flag)
    assert gpu.host_read(b).tolist() == [1, 1]
    gpu.host_write(a, np.zeros(2, np.float32))


def test_memory_begins_as_poison(gpu):
    assert np.isnan(gpu.allocate("a", 2).data).all()
    assert gpu.allocate("b", 1, np.uint16).data[0] == 65535


def test_reading_what_nobody_wrote_is_caught(gpu):
    a, b = gpu.allocate("a", 2), gpu.allocate("b", 2)
    with pytest.raises(OrderError, match="host reads a, which nobody wrote"):
        gpu.host_read(a)
    gpu.launch(_graph(gpu, a, b))
    with pytest.raises(OrderError, match="main reads a, which nobody wrote"):
        gpu.run_all()


def test_reading_without_a_flag_is_caught_after_the_kernel_too(gpu):
    a, b, flag = gpu.allocate("a", 2), gpu.allocate("b", 2), gpu.allocate_flag("f")
    gpu.host_write(a, np.ones(2, np.float32))
    gpu.launch(_graph(gpu, a, b, flag))
    gpu.run_all()
    with pytest.raises(OrderError, match="host reads b, but did not wait for main"):
        gpu.host_read(b)
    with pytest.raises(OrderError, match="host writes a, but did not wait for main"):
        gpu.host_write(a, np.ones(2, np.float32))


def test_a_flag_says_nothing_of_what_comes_behind_it(gpu):
    a, b, flag = gpu.allocate("a", 2), gpu.allocate("b", 2), gpu.allocate_flag("f")
    gpu.host_write(a, np.ones(2, np.float32))
    gpu.launch(_graph(gpu, a, b, flag))
    gpu.launch(_graph(gpu, a, b))
    _see(gpu, flag)
    gpu.run_all()
    with pytest.raises(OrderError, match="host reads b, but did not wait"):
        gpu.host_read(b)


def test_two_streams_are_in_no_order(gpu):
    a, b = gpu.allocate("a", 2), gpu.allocate("b", 2)
    gpu.host_write(a, np.ones(2, np.float32))
    graph = _graph(gpu, a, b)
    gpu.launch(graph)
    gpu.launch(graph, "another")
    with pytest.raises(OrderError, match="writes b, but did not wait for"):
        gpu.run_all()


def test_two_streams_that_raise_one_flag_are_caught(gpu):
    a, b, c = (gpu.allocate(name, 2) for name in "abc")
    flag = gpu.allocate_flag("f")
    gpu.host_write(a, np.ones(2, np.float32))
    gpu.launch(_graph(gpu, a, b, flag))
    gpu.launch(_graph(gpu, a, c, flag), "another")
    with pytest.raises(OrderError, match="raises f beside"):
        gpu.run_all()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda gpu, a, f: gpu.allocate("b", 1), "b is allocated in a capture"),
        (lambda gpu, a, f: gpu.allocate_flag("g"), "g is allocated in a capture"),
        (lambda gpu, a, f: gpu.host_read(a), "reads a in a capture"),
        (lambda gpu, a, f: gpu.host_write(a, np.ones(1)), "writes a in a capture"),
        (lambda gpu, a, f: gpu.is_raised(f, 0), "looks at f in a capture"),
        (lambda gpu, a, f: gpu.launch(()), "a graph is launched in a capture"),
        (lambda gpu, a, f: gpu.capture(lambda: None), "second capture begins in a"),
    ],
)
def test_a_capture_only_starts_kernels(gpu, work, message):
    a, flag = gpu.allocate("a", 1), gpu.allocate_flag("f")
    gpu.host_write(a, np.ones(1, np.float32))
    with pytest.raises(OrderError, match=message):
        gpu.capture(lambda: work(gpu, a, flag))
    # The failed capture has ended.
    assert gpu.capture(lambda: None) == ()


def test_kernels_start_in_captures_alone(gpu):
    with pytest.raises(OrderError, match="k starts outside of a capture"):
        gpu.start(Kernel("k", [], [], lambda: None))


def test_a_capture_runs_nothing(gpu):
    a, b = gpu.allocate("a", 1), gpu.allocate("b", 1)
    _graph(gpu, a, b)
    assert not gpu.run_one()
    assert np.isnan(b.data).all()


def test_a_kernel_cannot_write_what_it_said_it_reads(gpu):
    a = gpu.allocate("a", 1)
    gpu.host_write(a, np.ones(1, np.float32))

    def write(read):
        read[0] = 2

    gpu.launch(gpu.capture(lambda: gpu.start(Kernel("k", [a], [], write))))
    with pytest.raises(ValueError, match="read-only"):
        gpu.run_all()


def test_memory_that_is_freed_is_in_no_launch(gpu):
    a, b = gpu.allocate("a", 1), gpu.allocate("b", 1)
    graph = _graph(gpu, a, b)
    gpu.free(b)
    with pytest.raises(OrderError, match="k has b, which is freed"):
        gpu.launch(graph)
