"""No module of the host hands memory to C++ that it has not looked at."""

import numpy as np
import pytest
import torch

from testing.attention_pair import make_config, make_pair
from testing.filled import filled
from testing.paged_world import make_batch
from vllm_duck.errors import DuckShapeError
from vllm_duck.executor.duck import CallTimes, MoeSum
from vllm_duck.models.cpu.linear import Mlp
from vllm_duck.models.cpu.moe import PendingMoe, RemoteMoe, Router
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.dimensions import Dimensions

CONFIG = make_config()
SIZE = CONFIG.hidden_size
ROWS = 6
GOOD = np.zeros((ROWS, SIZE), np.uint16)

BAD = {
    "narrow": GOOD[:, : SIZE - 1].copy(),
    "wide": np.zeros((ROWS, SIZE + 16), np.uint16),
    "fp32": np.zeros((ROWS, SIZE), np.float32),
    "int16": GOOD.view(np.int16),
    "one row, flat": GOOD[0],
    "three dimensions": GOOD[None],
    "every second row": GOOD[::2],
    "columns of a wider array": np.zeros((ROWS, 2 * SIZE), np.uint16)[:, :SIZE],
    "by columns": np.asfortranarray(GOOD),
}
bad = pytest.mark.parametrize("x", BAD.values(), ids=BAD)


def _filled(module):
    filled(module)
    return module


@pytest.fixture(scope="module")
def mlp():
    return _filled(Mlp(SIZE, 64))


@pytest.fixture(scope="module")
def router():
    return _filled(Router(Dimensions.from_hf_config(CONFIG)))


@pytest.fixture(scope="module")
def attention():
    _, ours, _ = make_pair(CONFIG)
    return ours


@bad
def test_mlp_reads_no_other_memory(mlp, x):
    expected = rf"x must be \[T, {SIZE}\] uint16, contiguous, got"
    with pytest.raises(DuckShapeError, match=expected):
        mlp(x)
    with pytest.raises(DuckShapeError, match=expected):
        mlp.add_to(GOOD, x)


@bad
def test_mlp_adds_to_no_other_memory(mlp, x):
    with pytest.raises(DuckShapeError, match=r"residual must be \[T, .*\] uint16"):
        mlp.add_to(x, GOOD)


def test_mlp_needs_a_residual_for_each_row(mlp):
    with pytest.raises(DuckShapeError, match="residual must have the rows of x"):
        mlp.add_to(GOOD[:2], GOOD)


@bad
def test_router_reads_no_other_memory(router, x):
    with pytest.raises(DuckShapeError, match=rf"hidden must be \[T, {SIZE}\] uint16"):
        router(x)


def _rotations(num_rows=ROWS, dtype=np.complex64):
    return np.ones((num_rows, 1, CONFIG.qk_rope_head_dim // 2), dtype)


@bad
def test_attention_reads_no_other_memory(attention, x):
    batch = make_batch([ROWS], [ROWS], torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(DuckShapeError, match=rf"hidden must be \[T, {SIZE}\] uint16"):
        attention(x, CpuStep(batch, _rotations()))


@pytest.mark.parametrize(
    "rotations",
    [_rotations(ROWS - 1), _rotations(dtype=np.complex128), _rotations(2 * ROWS)[::2]],
    ids=["rows", "dtype", "layout"],
)
def test_attention_turns_by_no_other_memory(attention, rotations):
    batch = make_batch([ROWS], [ROWS], torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(DuckShapeError, match="rotations must be .6, 1, .* complex64"):
        attention(GOOD, CpuStep(batch, rotations))


def test_attention_needs_a_row_for_each_token(attention):
    batch = make_batch([ROWS], [ROWS], torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(DuckShapeError, match="each of the step's 6 tokens, got 5"):
        attention(GOOD[:5], CpuStep(batch, _rotations(5)))


class _Answer:
    def __init__(self, *shape):
        self.total = np.zeros(shape, np.float32)

    def is_done(self):
        return True

    def wait(self):
        return MoeSum(self.total, CallTimes(0, 0, 0, 0))


def test_a_sum_of_other_rows_is_not_added():
    shared = np.zeros((ROWS, SIZE), np.float32)
    for residual, total, message in (
        (GOOD, _Answer(ROWS - 1, SIZE), "the ducks' sum .5, .* must have the shape"),
        (GOOD[:2], _Answer(ROWS, SIZE), "the residual .2, .* must have the shape"),
        (GOOD.view(np.int16), _Answer(ROWS, SIZE), "residual must be"),
    ):
        with pytest.raises(DuckShapeError, match=message):
            PendingMoe(residual, shared, total).wait()


def test_the_proxy_sends_no_other_memory():
    moe = RemoteMoe(Dimensions.from_hf_config(CONFIG), layer_idx=1)
    _filled(moe.router)
    with pytest.raises(DuckShapeError, match="hidden must be"):
        moe.stage0(BAD["wide"], GOOD)
