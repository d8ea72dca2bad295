"""Layers that attend to what another layer has chosen: the same bits everywhere."""

import pytest
import torch

from testing.attention_pair import TOPK, make_config
from testing.filled import filled
from testing.host_threads import using
from testing.paged_world import BLOCK_SIZE, PagedWorld, make_batch
from testing.torch_host import numpy_bits
from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cpu import _host
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches
from vllm_duck.models.rope import Rope

ISAS = _host.supported_isas()
LENGTH = 6 * TOPK
NUM_BLOCKS = LENGTH // BLOCK_SIZE


@pytest.fixture(scope="module")
def layers():
    """One with an indexer and one without, in one world."""
    torch.manual_seed(0)
    config = make_config(num_attention_heads=40, num_key_value_heads=40)
    dims, world = Dimensions.from_hf_config(config), PagedWorld()
    with world.building():
        made = [
            SparseAttention(
                dims,
                LayerCaches.of(dims, "fp8", name, has_indexer=name == "full"),
                keeps_choices=name == "full",
            )
            for name in ("full", "shared")
        ]
    for layer in made:
        filled(layer)
    world.allocate()
    return made


def make_step(dims, first, last):
    """Positions [first, last) of one request."""
    table = torch.arange(NUM_BLOCKS)[None]
    rotations = Rope(dims.rope, dims.qk_rope_head_dim).rotations(
        torch.arange(first, last)
    )
    return CpuStep(make_batch([last - first], [last], table), rotations.numpy())


def run(layers, hidden, cuts):
    """Both layers over the rows, in steps; the second's output."""
    found = []
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        step = make_step(layers[0].dims, first, last)
        rows = numpy_bits(hidden[first:last])
        for layer in layers:
            rows, _ = layer(rows, step)
        found.append(torch.from_numpy(rows.copy()))
    return torch.cat(found)


@pytest.mark.parametrize("name", ISAS)
def test_threads_chunks_and_isa_leave_the_bits_alone(layers, name):
    hidden = torch.randn(LENGTH, 128).bfloat16()
    with using(1, "portable"):
        expected = run(layers, hidden, [0, LENGTH])
    for num_threads in (1, 3, 7):
        with using(num_threads, name, work_per_thread=1):
            for cuts in ([0, LENGTH], [0, 5, TOPK + 1, 60, LENGTH - 1, LENGTH]):
                assert torch.equal(run(layers, hidden, cuts), expected)


def test_rows_behind_a_step_s_attend_to_what_those_chose(layers):
    """Of a row that saw index_topk positions or fewer: to the first of these."""
    full, _ = layers
    hidden = torch.randn(LENGTH, 128).bfloat16()
    step = make_step(full.dims, 0, LENGTH)
    full(numpy_bits(hidden), step)
    table = torch.arange(NUM_BLOCKS)[None]
    batch = make_batch([1, 1], [60, 70], table.expand(2, -1))
    rotations = torch.ones(2, 1, 16, dtype=torch.complex64)
    behind = step.behind(torch.tensor([TOPK - 1, 50]).numpy(), batch, rotations)
    assert behind.is_chosen
    assert behind.choices[0].tolist() == list(range(TOPK))
    assert behind.choices[1].tolist() == step.choices[50].tolist()
    assert behind.choices[1].max() <= 50
    before = behind.choices.copy()
    full(numpy_bits(hidden[:2]), behind)
    assert (behind.choices == before).all()


def test_behind_a_step_that_kept_nothing_rows_choose_for_themselves(layers):
    step = make_step(layers[0].dims, 0, 4)
    rotations = torch.ones(1, 1, 16, dtype=torch.complex64)
    behind = step.behind(torch.tensor([3]).numpy(), step.batch, rotations)
    assert not behind.is_chosen
    assert behind.choices is None


def test_without_a_choice_a_layer_without_an_indexer_is_refused(layers):
    step = make_step(layers[0].dims, 0, 4)
    match = r"needs choices \[4, 16\] of a layer before it, got None"
    with pytest.raises(DuckShapeError, match=match):
        layers[1](numpy_bits(torch.zeros(4, 128).bfloat16()), step)
