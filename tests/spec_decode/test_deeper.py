"""Where deeper drafts are cached, and who still drafts."""

import numpy as np
import pytest
import torch

from vllm_duck.models.batch import AttentionBatch, RequestRows
from vllm_duck.spec_decode.confirmed import ConfirmedRows
from vllm_duck.spec_decode.deeper import deeper_rows

BLOCK_SIZE = 4


def make_rows(last_positions):
    """One confirmed row per request, each with four blocks of its own."""
    num_reqs = len(last_positions)
    table = np.arange(1, 1 + 4 * num_reqs, dtype=np.int32).reshape(num_reqs, 4)
    slots = [
        int(table[i, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
        for i, at in enumerate(last_positions)
    ]
    batch = AttentionBatch(
        tuple(RequestRows(1, at + 1) for at in last_positions),
        np.array(slots),
        table,
        BLOCK_SIZE,
    )
    return ConfirmedRows(
        next_ids=torch.zeros(num_reqs, dtype=torch.int64),
        positions=torch.tensor(last_positions),
        hidden=torch.zeros(num_reqs, 2),
        last=torch.arange(num_reqs),
        batch=batch,
    )


def test_a_row_per_request_behind_its_last():
    rows = deeper_rows(make_rows([2, 7]), 2, [16, 16])
    assert rows.requests.tolist() == [0, 1]
    assert rows.positions.tolist() == [4, 9]
    # The second block of the first request, the third of the second.
    assert rows.batch.slots.tolist() == [2 * 4, 7 * 4 + 1]
    assert rows.batch.requests == (RequestRows(1, 5), RequestRows(1, 10))
    assert rows.batch.block_table.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("room", "requests"), [([3, 16], [1]), ([4, 0], [0]), ([4, 9], [0, 1])]
)
def test_who_has_no_slot_drafts_no_further(room, requests):
    rows = deeper_rows(make_rows([2, 7]), 1, room)
    assert rows.requests.tolist() == requests
    assert rows.batch.num_tokens == len(requests)


def test_nobody_with_room_is_the_end():
    assert deeper_rows(make_rows([2, 7]), 1, [3, 8]) is None
