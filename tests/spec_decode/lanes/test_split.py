"""Lanes: which rows go where, why a step stays whole, and that no bit changes."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from testing.attention_pair import make_config, make_pair
from testing.paged_world import BLOCK_SIZE, make_batch, run_attention
from vllm_duck.models.batch import AttentionBatch
from vllm_duck.models.cpu.step import CpuStep
from vllm_duck.models.cpu.threads import from_bits, to_bits
from vllm_duck.models.rope import Rope
from vllm_duck.spec_decode.lanes import run
from vllm_duck.spec_decode.lanes import split as split_module
from vllm_duck.spec_decode.lanes.policy import SLOWER
from vllm_duck.spec_decode.lanes.split import Split, split


def halved(batch: AttentionBatch, num_rows: int) -> Split | str:
    return split(batch, num_rows, num_lanes=2)


def cuts_of(halves: Split) -> list[list[int]]:
    return [[r.num_rows for r in batch.requests] for batch in halves.batches]


def blocks(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_a_pair_is_cut_between_the_token_and_its_draft():
    halves = halved(make_batch([2], [40], blocks([0, 1, 2])), 2)
    assert cuts_of(halves) == [[1], [1]]
    assert halves.batches[0].requests[0].first_visible == 39
    assert halves.batches[1].requests[0].first_visible == 40
    assert halves.order is None


def test_a_prompt_chunk_is_cut_in_halves():
    halves = halved(make_batch([31], [31], blocks([0, 1])), 31)
    assert cuts_of(halves) == [[16], [15]]


def test_requests_without_drafts_are_divided_whole():
    batch = make_batch(
        [1] * 5, [20] * 5, blocks(*[[2 * i, 2 * i + 1] for i in range(5)])
    )
    halves = halved(batch, 5)
    assert cuts_of(halves) == [[1, 1, 1], [1, 1]]
    assert halves.order is None


def test_a_mixed_batch_is_halved_by_tokens():
    batch = make_batch([2, 1, 9], [20, 20, 9], blocks([0, 1], [2, 3], [4, 5]))
    assert cuts_of(halved(batch, 12)) == [[2, 1, 3], [6]]


def test_three_lanes_hold_thirds():
    batch = make_batch([2, 1, 9], [20, 20, 9], blocks([0, 1], [2, 3], [4, 5]))
    assert cuts_of(split(batch, 12, num_lanes=3)) == [[2, 1, 1], [4], [4]]
    pair = make_batch([2], [40], blocks([0, 1, 2]))
    assert cuts_of(split(pair, 2, num_lanes=3)) == [[1], [1]]


@pytest.mark.parametrize(
    ("batch", "num_rows", "reason"),
    [
        (make_batch([1], [9], blocks([0])), 1, "one token"),
        (make_batch([2], [9], blocks([0])), 3, "padded step"),
        (
            # Two requests that read each other's blocks: no order is right.
            make_batch([1, 1], [17, 17], blocks([0, 1], [1, 0])),
            2,
            "every request reads what another writes",
        ),
    ],
)
def test_a_step_stays_whole_for_a_reason(batch, num_rows, reason):
    assert halved(batch, num_rows) == reason


def test_a_reader_of_blocks_written_in_this_step_is_in_the_last_lane():
    """The reader comes first in the batch, and would be in the first lane by order."""
    table = blocks([7, 8, 9, 10], [7, 8, 11, 12])
    reader_first = make_batch([10, 40], [42, 40], table)
    halves = halved(reader_first, 50)
    assert cuts_of(halves) == [[25], [10, 15]]
    assert halves.batches[0].requests[0].first_visible == 1
    rows = np.arange(50)
    first, second = _part(halves, rows)
    assert first.tolist() == list(range(10, 35))
    assert second.tolist() == [*range(10), *range(35, 50)]
    assert np.array_equal(_join(halves, [first, second]), rows)


def test_blocks_of_earlier_steps_are_no_reason_to_wait():
    table = blocks([7, 8, 9], [7, 8, 10])
    batch = make_batch([4, 4], [40, 40], table)
    assert cuts_of(halved(batch, 8)) == [[4], [4]]


def _part(halves: Split, rows):
    return [rows[lane] for lane in halves.lanes]


def _join(halves: Split, parts):
    joined = np.concatenate(parts)
    return joined if halves.place is None else joined[halves.place]


def _first_layer_of_two(halves, hidden, rotations, ours) -> torch.Tensor:
    parts = zip(
        _part(halves, to_bits("hidden", hidden, 128)),
        halves.batches,
        _part(halves, rotations.numpy()),
        strict=True,
    )
    return from_bits(
        _join(halves, [ours(rows, CpuStep(*step))[0] for rows, *step in parts])
    )


def test_without_the_guard_a_reader_would_see_unwritten_keys(monkeypatch):
    """The reader comes first in the batch; what it reads is written by the second."""
    _, ours, world = make_pair(make_config())
    shared = torch.randn(32, 128).bfloat16()
    hidden = torch.cat([torch.randn(30, 128).bfloat16(), shared])
    positions = torch.tensor([*range(32, 62), *range(32)])
    rotations = Rope(ours.dims.rope, 32).rotations(positions)
    batch = make_batch([30, 32], [62, 32], blocks([0, 1, 2, 3], [0, 1, 4, 5]))

    def attended(divided):
        world.allocate()
        if divided is None:
            return run_attention(ours, hidden, rotations, batch)[0]
        return _first_layer_of_two(divided, hidden, rotations, ours)

    whole = attended(None)
    assert torch.equal(attended(halved(batch, 62)), whole)
    monkeypatch.setattr(split_module, "_same_step_readers", lambda batch: set())
    assert not torch.equal(attended(halved(batch, 62)), whole)


@pytest.mark.parametrize("num_lanes", [2, 3, 4])
def test_random_steps_are_divided_soundly(num_lanes):
    rng = random.Random(0)
    for _ in range(200):
        batch = _random_step(rng)
        halves = split(batch, batch.num_tokens, num_lanes=num_lanes)
        if isinstance(halves, str):
            continue
        rows = np.arange(batch.num_tokens)
        parts = _part(halves, rows)
        assert np.array_equal(_join(halves, parts), rows)
        assert [len(part) for part in parts] == [b.num_tokens for b in halves.batches]
        # What a lane sees was written by then: a row's own slot, or an earlier lane's.
        written_at = {}
        for lane, lane_batch in enumerate(halves.batches):
            for slot in lane_batch.slots.tolist():
                written_at[slot] = lane
        for lane, lane_batch in enumerate(halves.batches):
            for slot in _seen_slots(lane_batch):
                assert written_at.get(slot, 0) <= lane


def _random_step(rng) -> AttentionBatch:
    """Requests with a shared beginning, some of which is written in this step."""
    num_requests = rng.randrange(1, 5)
    shared = rng.randrange(0, 4)
    new, lens, table = [], [], []
    own = 100
    for i in range(num_requests):
        total = rng.randrange(shared * BLOCK_SIZE + 1, 6 * BLOCK_SIZE)
        # The first may write the shared blocks; others hit them.
        context = rng.randrange(0, total) if i == 0 else shared * BLOCK_SIZE
        new.append(total - context)
        lens.append(total)
        table.append([*range(shared), *range(own, own + 6 - shared)])
        own += 6
    order = list(range(num_requests))
    rng.shuffle(order)
    return make_batch(
        [new[i] for i in order],
        [lens[i] for i in order],
        torch.tensor([table[i] for i in order], dtype=torch.int32),
    )


def _seen_slots(batch: AttentionBatch) -> set[int]:
    seen = set()
    for request, row in zip(batch.requests, batch.block_table.tolist(), strict=True):
        for position in range(request.first_visible + request.num_rows - 1):
            seen.add(row[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    return seen


def test_the_page_names_every_reason_of_a_serial_step():
    page = (Path(__file__).parents[3] / "docs" / "lanes.md").read_text()
    sources = (Path(module.__file__).read_text() for module in (split_module, run))
    returned = [r for text in sources for r in re.findall(r'return "(.+)"', text)]
    assert len(returned) == 4
    for reason in (SLOWER, *returned):
        assert f"`{reason}`" in page
