"""Sparse attention: float64's numbers, each row's own bits, and none of padding."""

import pytest
import torch

from testing.gpu.numbers import COMPANIES, assert_close, bits, lowered, poisoned, seeded
from testing.gpu.paged import latent_cache
from testing.torch_host import unpack_latent
from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cuda.kernels.attend import attend, num_splits
from vllm_duck.models.kv_format import LatentFormat

SLOTS, SCALE = 600, 0.07


def make_query(num_rows, heads, latent, rope):
    g = seeded(num_rows)
    return bits(torch.randn(num_rows, heads, latent + rope, generator=g))


def run(query, cache, slots, counts, latent):
    num_rows, heads = query.shape[:2]
    splits = num_splits(slots.shape[1])
    out = poisoned(num_rows, heads, latent)
    attend(
        query,
        cache,
        slots,
        torch.tensor(counts, dtype=torch.int32),
        poisoned(num_rows, splits, heads, latent, dtype=torch.float32),
        poisoned(num_rows, splits, heads, 2, dtype=torch.float32),
        out,
        scale=SCALE,
    )
    return out


def make_slots(num_rows, topk, counts):
    slots = torch.randint(0, SLOTS, (num_rows, topk), generator=seeded(topk)).int()
    for row, count in enumerate(counts):
        slots[row, count:] = -1
    return slots


def reference(query, cache, slots, counts, latent, rope):
    """In float64, from the same bytes."""
    form = LatentFormat(latent, rope, "fp8")
    rows = []
    for row, count in enumerate(counts):
        keys = unpack_latent(form, cache[slots[row, :count].long()]).double()
        logits = query[row].view(torch.bfloat16).double() @ keys.T * SCALE
        rows.append(logits.softmax(1) @ keys[:, :latent])
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("heads", "latent", "rope", "counts"),
    [
        (4, 128, 64, [5]),
        (20, 256, 32, [0, 33, 300]),
        (3, 128, 64, [1, 31, 32, 255, 256, 257, 512]),
        (16, 512, 64, [600]),
    ],
)
def test_attention_is_float64_s(heads, latent, rope, counts):
    num_rows = len(counts)
    cache = latent_cache(SLOTS, latent, rope)
    query = make_query(num_rows, heads, latent, rope)
    slots = make_slots(num_rows, 768, counts)
    out = run(query, cache, slots, counts, latent)
    want = reference(query, cache, slots, counts, latent, rope)
    # Weights have 8 bits; the sum of their errors is a fraction of one.
    assert_close(lowered(out), want, 2**-8)


@pytest.mark.parametrize("company", COMPANIES)
def test_a_row_s_bits_are_its_own(company):
    # Two splits; of the others some have none, the interpreter is slow.
    counts = [*range(company - 1), 300]
    cache, query = latent_cache(SLOTS, 128, 32), make_query(company, 2, 128, 32)
    slots = make_slots(company, 512, counts)
    out = run(query, cache, slots, counts, 128)
    last = query[-1:].clone(), cache, slots[-1:].clone(), counts[-1:]
    assert torch.equal(run(*last, 128)[0], out[-1])


def test_room_for_more_positions_changes_no_bit():
    cache, query = latent_cache(SLOTS, 128, 32), make_query(1, 2, 128, 32)
    slots = make_slots(1, 1024, [300])
    wide = run(query, cache, slots, [300], 128)
    narrow = run(query, cache, slots[:, :512].contiguous(), [300], 128)
    assert torch.equal(wide, narrow)


def test_logits_far_from_zero_overflow_nothing():
    cache, query = latent_cache(SLOTS, 128, 32), make_query(2, 2, 128, 32)
    query = bits(query.view(torch.bfloat16).float() * 2.0**20)
    slots = make_slots(2, 512, [400, 3])
    out = run(query, cache, slots, [400, 3], 128)
    want = reference(query, cache, slots, [400, 3], 128, 32)
    assert_close(lowered(out), want, 2**-8)


def test_other_shapes_are_refused():
    cache, query = latent_cache(SLOTS, 128, 32), make_query(1, 2, 128, 32)
    slots = make_slots(1, 512, [3])
    with pytest.raises(DuckShapeError, match=r"latent cache must be \[any, 196\]"):
        run(query, cache[:, :-4].contiguous(), slots, [3], 128)
    with pytest.raises(DuckShapeError, match="kv_lora_rank must be a power of two"):
        run(query, cache, slots, [3], 96)
    with pytest.raises(DuckShapeError, match=r"counts must be \[1\] torch.int32"):
        run(query, cache, slots, [3, 3], 128)
