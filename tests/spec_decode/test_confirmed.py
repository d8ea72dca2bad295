"""Which rows the MTP layer sees, and with which tokens."""

import torch

from vllm_duck.models.batch import RequestRows
from vllm_duck.spec_decode.confirmed import confirmed_rows


def _rows(starts, seq_lens, num_rejected, next_ids):
    num_rows = starts[-1]
    return confirmed_rows(
        token_ids=torch.arange(100, 100 + num_rows),
        positions=torch.arange(num_rows),
        hidden=torch.arange(2.0 * num_rows).view(num_rows, 2),
        starts=starts,
        seq_lens=seq_lens,
        num_rejected=num_rejected,
        next_ids=torch.tensor(next_ids, dtype=torch.int32),
        slots=torch.arange(num_rows) + 1000,
        block_table=torch.zeros(len(seq_lens), 3, dtype=torch.int32),
        block_size=16,
    )


def test_a_rejected_row_is_cut_out():
    rows = _rows([0, 2, 4, 5], [20, 30, 9], [1, 0, 0], [7, 8, 9])
    assert rows.positions.tolist() == [0, 2, 3, 4]
    assert rows.next_ids.tolist() == [7, 103, 8, 9]
    assert rows.hidden[:, 0].tolist() == [0, 4, 6, 8]
    assert rows.last.tolist() == [0, 2, 3]
    assert rows.batch.slots.tolist() == [1000, 1002, 1003, 1004]
    assert rows.batch.requests == (
        RequestRows(1, 19),
        RequestRows(2, 29),
        RequestRows(1, 9),
    )


def test_a_prompt_chunk_is_shifted_by_one():
    rows = _rows([0, 4], [4], [0], [55])
    assert rows.next_ids.tolist() == [101, 102, 103, 55]
    assert rows.batch.requests == (RequestRows(4, 1),)
    assert rows.last.tolist() == [3]
