"""What projections are cut into: the C++ host's cache bytes, and float64's numbers."""

import pytest
import torch

from testing.gpu import cpp_host
from testing.gpu.numbers import (
    COMPANIES,
    assert_close,
    bits,
    lifted,
    lowered,
    poisoned,
    seeded,
)
from vllm_duck.errors import DuckConfigError, DuckShapeError
from vllm_duck.models.cuda.kernels.split import (
    Caches,
    KeyNorms,
    split_down,
    split_up,
)

EPS, INDEX_EPS, INDEX_SCALE = 1e-6, 2e-6, 0.125
SLOTS = 40
# q_lora_rank, kv_lora_rank, qk_rope_head_dim, index_head_dim, index heads
OFFICIAL = (1536, 512, 64, 128, 64)
SMALL = (72, 128, 32, 128, 5)


class Rows:
    """Projections of rows, and what split_down makes of them."""

    def __init__(self, num_rows, sizes, *, num_parts=(1, 1)):
        q, latent, rope, dim, heads = sizes
        g = seeded(num_rows)
        self.sizes, self.num_rows = sizes, num_rows
        size = q + latent + rope + dim
        self.down = torch.randn(num_parts[0], num_rows, size, generator=g)
        self.head_weights = torch.randn(num_parts[1], num_rows, heads, generator=g)
        angles = torch.rand(num_rows, rope // 2, generator=g) * 7
        self.rotations = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        self.norms = KeyNorms(
            *(torch.rand(n, generator=g) + 0.5 for n in (q, latent, dim)),
            torch.randn(dim, generator=g) * 0.3,
            eps=EPS,
            index_eps=INDEX_EPS,
        )
        self.slots = torch.randperm(SLOTS, generator=g)[:num_rows]
        self.caches = Caches(
            poisoned(SLOTS, latent + latent // 32 + 2 * rope, dtype=torch.uint8),
            poisoned(SLOTS, dim + 4, dtype=torch.uint8),
        )
        self.low_query = poisoned(num_rows, q)
        self.index_weights = poisoned(num_rows, heads, dtype=torch.float32)

    def split(self):
        split_down(
            self.down,
            self.head_weights,
            self.slots,
            self.rotations,
            self.norms,
            self.caches,
            self.low_query,
            self.index_weights,
            index_scale=INDEX_SCALE,
        )
        return self

    def alone(self, row):
        """The same row without the others, split."""
        one = Rows(1, self.sizes)
        one.down, one.head_weights = (
            part[:, row : row + 1].clone() for part in (self.down, self.head_weights)
        )
        one.rotations, one.slots = self.rotations[row:][:1], self.slots[row:][:1]
        one.rotations, one.slots = one.rotations.clone(), one.slots.clone()
        one.norms = self.norms
        return one.split()

    def by_cpp(self, row):
        n = self.norms
        return cpp_host.split_row(
            self.down[0, row],
            self.head_weights[0, row],
            self.rotations[row].contiguous(),
            (n.q, n.kv, n.index, n.index_bias),
            eps=EPS,
            index_eps=INDEX_EPS,
            index_scale=INDEX_SCALE,
        )


def assert_as_cpp(rows, row):
    want, slot = rows.by_cpp(row), rows.slots[row]
    assert torch.equal(rows.caches.latent[slot], want.latent)
    assert torch.equal(rows.caches.index[slot], want.index)
    assert torch.equal(rows.index_weights[row], want.index_weights)
    # Its sums are in another order: there the numbers are near, not the bits.
    got, query = lowered(rows.low_query[row]), want.low_query.view(torch.bfloat16)
    assert_close(got, query.double(), 2**-9)


@pytest.mark.parametrize("sizes", [OFFICIAL, SMALL], ids=["official", "small"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_cached_bytes_are_those_of_the_cpp_host(num_rows, sizes):
    rows = Rows(num_rows, sizes).split()
    for row in range(num_rows):
        assert_as_cpp(rows, row)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[rows.slots] = False
    assert (rows.caches.latent[others] == 0xFF).all()
    assert (rows.caches.index[others] == 0xFF).all()


def test_zeros_nans_and_subnormals_are_cached_as_the_cpp_host_does():
    rows = Rows(4, SMALL)
    rows.norms.index_bias.zero_()
    rows.down[0, 0] = 0
    rows.down[0, 1] = float("nan")
    rows.down[0, 2, 100:140] = float("nan")
    rows.down[0, 3] *= 1e-38
    rows.split()
    for row in range(4):
        want, slot = rows.by_cpp(row), rows.slots[row]
        assert torch.equal(rows.caches.latent[slot], want.latent)
        assert torch.equal(rows.caches.index[slot], want.index)


def test_parts_of_sums_are_added_in_rising_order():
    rows = Rows(2, SMALL, num_parts=(3, 4)).split()
    whole = Rows(2, SMALL)
    whole.down = ((rows.down[0] + rows.down[1]) + rows.down[2])[None].contiguous()
    weights = rows.head_weights
    whole.head_weights = (weights[0] + weights[1] + weights[2] + weights[3])[None]
    whole.rotations, whole.norms, whole.slots = rows.rotations, rows.norms, rows.slots
    whole.split()
    assert torch.equal(rows.caches.latent, whole.caches.latent)
    assert torch.equal(rows.caches.index, whole.caches.index)
    assert torch.equal(rows.low_query, whole.low_query)
    assert torch.equal(rows.index_weights, whole.index_weights)


def test_padding_is_not_cached():
    rows = Rows(3, SMALL)
    rows.slots[1] = -1
    rows.split()
    assert (rows.caches.latent != 0xFF).any(1).sum() == 2
    assert (rows.caches.index != 0xFF).any(1).sum() == 2
    assert not lowered(rows.low_query).isnan().any()


@pytest.mark.parametrize("company", COMPANIES)
def test_a_row_s_bits_are_its_own(company):
    rows = Rows(company, SMALL).split()
    row = company - 1
    one, slot = rows.alone(row), rows.slots[row]
    assert torch.equal(one.caches.latent[slot], rows.caches.latent[slot])
    assert torch.equal(one.caches.index[slot], rows.caches.index[slot])
    assert torch.equal(one.low_query[0], rows.low_query[row])
    assert torch.equal(one.index_weights[0], rows.index_weights[row])


def rotated(x, rotations, *, rope):
    """x [T, heads, D] fp32: its first channels turned; in fp32, as the kernels do."""
    pairs, turn = x[..., :rope].unflatten(-1, (-1, 2)), rotations.unflatten(-1, (-1, 2))
    (real, imaginary), (cos, sin) = pairs.unbind(-1), turn[:, None].unbind(-1)
    both = [real * cos - imaginary * sin, real * sin + imaginary * cos]
    return torch.cat([torch.stack(both, -1).flatten(-2), x[..., rope:]], -1)


@pytest.mark.parametrize(
    ("num_rows", "heads", "nope", "index_heads"), [(1, 3, 40, 2), (3, 2, 128, 5)]
)
def test_heads_are_cut_and_rotated(num_rows, heads, nope, index_heads):
    rows, latent, rope, dim = Rows(num_rows, SMALL), 64, 32, 128
    size = heads * (nope + rope) + index_heads * dim
    up = torch.randn(num_rows, size, generator=seeded(1))
    nopes = poisoned(num_rows, heads, nope)
    query = poisoned(num_rows, heads, latent + rope)
    index = poisoned(num_rows, index_heads, dim)
    split_up(up, rows.rotations, nopes, query, index)
    parts = up.split([heads * (nope + rope), index_heads * dim], 1)
    main, other = (
        part.unflatten(1, (n, -1))
        for part, n in zip(parts, (heads, index_heads), strict=True)
    )
    assert torch.equal(nopes, lifted(main[..., :nope]))
    turned = bits(rotated(main[..., nope:], rows.rotations, rope=rope))
    assert torch.equal(query[..., latent:].contiguous(), turned)
    assert (query[..., :latent].contiguous().view(torch.int16) == -1).all()
    assert torch.equal(index, bits(rotated(other, rows.rotations, rope=rope)))


def test_other_shapes_are_refused():
    rows = Rows(2, SMALL)
    rows.down = rows.down[:, :, :-1].contiguous()
    with pytest.raises(DuckShapeError, match=r"down must be \[any, 2, 360\]"):
        rows.split()
    rows = Rows(2, SMALL)
    rows.slots = rows.slots.int()
    with pytest.raises(DuckShapeError, match=r"slots must be \[2\] torch.int64"):
        rows.split()
    rows = Rows(2, SMALL)
    rows.caches = Caches(rows.caches.latent[:, :-4].contiguous(), rows.caches.index)
    with pytest.raises(DuckShapeError, match=r"latent cache must be \[any, 196\]"):
        rows.split()
    with pytest.raises(DuckShapeError, match="kv_lora_rank must be a power of two"):
        Rows(1, (72, 384, 32, 128, 5)).split()
    with pytest.raises(DuckConfigError, match="index_head_dim must be 128"):
        Rows(1, (72, 128, 32, 64, 5)).split()
    rotations = torch.zeros(2, 32)
    one, two = poisoned(2, 1, 40), poisoned(2, 1, 128)
    with pytest.raises(DuckShapeError, match=r"up must be \[2, 200\]"):
        split_up(torch.zeros(2, 201), rotations, one, poisoned(2, 1, 64), two)
