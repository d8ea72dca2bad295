"""The indexer: float64's scores, an exact and ordered choice, each row's own bits."""

import pytest
import torch

from testing.gpu.numbers import COMPANIES, assert_close, bits, poisoned, seeded
from testing.gpu.paged import context_of, index_cache, slots_of
from testing.torch_host import choose, dequantize
from vllm_duck.errors import DuckShapeError
from vllm_duck.models.cuda.kernels.index import Context, index_scores, select
from vllm_duck.models.cuda.kernels.tiles import Tile

PAGE, NUM_BLOCKS = 16, 40
# Wide: the interpreter pays for each program.
KEYS = Tile(block=128, num_warps=4)


def make_queries(num_rows, heads):
    g = seeded(num_rows)
    query = torch.randn(num_rows, heads, 128, generator=g)
    return bits(query), torch.randn(num_rows, heads, generator=g)


def score(query, weights, cache, context, *, topk=0, longest=None):
    longest = longest or int(context.visible.max())
    scores = poisoned(len(query), longest, dtype=torch.float32)
    index_scores(query, weights, cache, context, scores, topk=topk, tile=KEYS)
    return scores


def choose_slots(scores, context, topk, *, chunk=256):
    slots = poisoned(len(scores), topk, dtype=torch.int32)
    counts = poisoned(len(scores), dtype=torch.int32)
    select(scores, context, slots, counts, tile=Tile(block=chunk, num_warps=4))
    return slots, counts


@pytest.mark.parametrize(
    ("visible", "heads", "page"),
    [([7], 16, 16), ([300, 301, 0], 5, 16), ([64, 65, 500], 64, 64)],
)
def test_scores_are_float64_s(visible, heads, page):
    cache = index_cache(NUM_BLOCKS * page)
    context = context_of(visible, page=page, num_blocks=NUM_BLOCKS, num_requests=2)
    query, weights = make_queries(len(visible), heads)
    scores = score(query, weights, cache, context)
    for row, count in enumerate(visible):
        slots = slots_of(context, row, torch.arange(count))
        keys = dequantize(cache[slots], 128).double()
        dots = (query[row].view(torch.bfloat16).double() @ keys.T).clamp(min=0)
        want = (dots * weights[row].double()[:, None]).sum(0)
        assert_close(scores[row, :count].double(), want, 1e-6)
        assert scores[row, count:].isnan().all()


def test_rows_without_a_choice_are_not_scored():
    context = context_of([20, 64, 65], page=PAGE, num_blocks=NUM_BLOCKS)
    query, weights = make_queries(3, 4)
    cache = index_cache(NUM_BLOCKS * PAGE)
    scores = score(query, weights, cache, context, topk=64)
    assert scores[:2].isnan().all()
    slots, counts = choose_slots(scores, context, 64)
    assert counts.tolist() == [20, 64, 64]
    for row, count in enumerate((20, 64)):
        want = slots_of(context, row, torch.arange(count))
        assert slots[row, :count].tolist() == want.tolist()


@pytest.mark.parametrize("company", COMPANIES)
def test_a_row_s_scores_are_its_own(company):
    visible = [200 + row for row in range(company)]
    context = context_of(visible, page=PAGE, num_blocks=NUM_BLOCKS)
    query, weights = make_queries(company, 4)
    cache = index_cache(NUM_BLOCKS * PAGE)
    scores = score(query, weights, cache, context)
    alone = Context(
        context.visible[-1:].clone(),
        context.request_of[:1],
        context.block_table,
        PAGE,
    )
    one = score(query[-1:].clone(), weights[-1:].clone(), cache, alone)
    assert torch.equal(one[0], scores[-1])


def make_scores(kind, num_rows, size):
    g = seeded(num_rows)
    if kind == "ties":
        return torch.randint(-2, 3, (num_rows, size), generator=g).float() * 0.5
    scores = torch.randn(num_rows, size, generator=g)
    if kind == "equal":
        return torch.zeros_like(scores)
    if kind == "zeros of both signs":
        return torch.where(scores > 1, scores, torch.copysign(torch.zeros(1), scores))
    return scores * 10 ** torch.randint(-20, 20, scores.shape, generator=g).float()


@pytest.mark.parametrize("chunk", [256, 1024])
@pytest.mark.parametrize("kind", ["wild", "ties", "equal", "zeros of both signs"])
def test_the_best_are_chosen_in_rising_order_and_later_ones_of_equals(kind, chunk):
    visible, topk = [700, 64, 65, 0, 3], 64
    context = context_of(visible, page=PAGE, num_blocks=NUM_BLOCKS, num_requests=2)
    scores = make_scores(kind, len(visible), 700)
    for row, count in enumerate(visible):
        scores[row, count:] = float("nan")
    slots, counts = choose_slots(scores, context, topk, chunk=chunk)
    for row, count in enumerate(visible):
        seen = scores[row : row + 1, :count] + 0.0
        chosen = choose(seen, torch.tensor([count]), topk)[0].nonzero()[:, 0]
        assert counts[row] == len(chosen) == min(count, topk)
        got = slots[row, : counts[row]].tolist()
        assert got == slots_of(context, row, chosen).tolist()
        assert (slots[row, counts[row] :] == -1).all()


def test_a_long_context_is_chosen_from():
    context = context_of([9000], page=64, num_blocks=200)
    scores = make_scores("ties", 1, 9000)
    slots, counts = choose_slots(scores, context, 2048, chunk=4096)
    chosen = choose(scores, torch.tensor([9000]), 2048)[0].nonzero()[:, 0]
    assert counts.tolist() == [2048]
    assert slots[0].tolist() == slots_of(context, 0, chosen).tolist()


def test_other_shapes_are_refused():
    context = context_of([20, 20], page=PAGE, num_blocks=NUM_BLOCKS)
    query, weights = make_queries(2, 4)
    cache = index_cache(64)
    with pytest.raises(DuckShapeError, match=r"index cache must be \[any, 132\]"):
        score(query, weights, cache[:, :128].contiguous(), context)
    with pytest.raises(DuckShapeError, match=r"weights must be \[2, 4\]"):
        score(query, weights[:, :3].contiguous(), cache, context)
    one = context_of([20], page=PAGE, num_blocks=NUM_BLOCKS)
    with pytest.raises(DuckShapeError, match=r"visible must be \[2\] torch.int32"):
        score(query, weights, cache, one)
    with pytest.raises(DuckShapeError, match=r"visible must be \[2\] torch.int32"):
        choose_slots(torch.zeros(2, 20), one, 8)
