"""Slow, obvious references for the kernel: float64 with an error bound, and float32 in
the documented order of additions, whose bits the kernel must give."""

from dataclasses import dataclass

import numpy as np

from testing.ducks.bf16 import f32_to_bf16
from vllm_duck.executor.compute.kernel import (
    BLOCK,
    GROUP_SIZES,
    LayerWeights,
    num_groups,
)
from vllm_duck.executor.wire.bf16 import bf16_to_f32

TILE_K = 32
# The rounding error of fp32 (24 significant bits) and of bf16 (8), relative.
U32 = 2.0**-24
U16 = 2.0**-8


def _e4m3_values() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values)


E4M3 = _e4m3_values()


@dataclass
class Expert:
    """One expert's slice as load_expert takes it; scales are None for bf16."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_scale: np.ndarray | None = None
    up_scale: np.ndarray | None = None
    down_scale: np.ndarray | None = None


@dataclass
class Shard:
    """Experts, their packed form, and where they are in the model."""

    experts: list[Expert]
    weights: LayerWeights
    expert_lo: int = 0
    n_routed_experts: int = 0

    def forward(self, kernel, hidden, ids, topk_weights, dtype=np.float32):
        # Not zeros: a column that nobody writes must show.
        out = np.full(hidden.shape, 0x7FC0, dtype=dtype)
        kernel.forward(
            self.weights,
            hidden,
            ids,
            topk_weights,
            expert_lo=self.expert_lo,
            n_routed_experts=self.n_routed_experts or len(self.experts),
            out=out,
        )
        return out


def random_codes(rng, shape, low=0, high=256) -> np.ndarray:
    """e4m3 codes without NaN."""
    codes = rng.integers(low, high, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] ^= 1
    return codes


def make_expert(
    rng,
    *,
    hidden,
    columns,
    offset,
    weight_format="e4m3-block128",
    codes=None,
    scale=1e-3,
) -> Expert:
    """`codes(rng, shape)` draws e4m3 codes; scales are around `scale`."""
    if weight_format in GROUP_SIZES:
        return _make_grouped_expert(rng, hidden, columns, offset, weight_format, scale)
    shapes = [(columns, hidden), (columns, hidden), (hidden, columns)]
    if weight_format == "bf16":
        drawn = [rng.standard_normal(s, dtype=np.float32) / 8 for s in shapes]
        return Expert(*(f32_to_bf16(w) for w in drawn))
    column_blocks, hidden_blocks = -(-(offset + columns) // BLOCK), -(-hidden // BLOCK)
    blocks = [(column_blocks, hidden_blocks)] * 2 + [(hidden_blocks, column_blocks)]
    return Expert(
        *((codes or random_codes)(rng, shape) for shape in shapes),
        *(np.float32(rng.uniform(0.5, 2, b) * scale) for b in blocks),
    )


def _make_grouped_expert(rng, hidden, columns, offset, weight_format, scale):
    """Any codes but int8's -128, and scales of both signs, as int4 has them."""
    codes, scales = [], []
    for rows, num_k, first in [(columns, hidden, 0)] * 2 + [(hidden, columns, offset)]:
        if weight_format == "int4-group32":
            drawn = rng.integers(0, 256, (rows, num_k // 2), dtype=np.uint8)
        else:
            drawn = rng.integers(-127, 128, (rows, num_k), dtype=np.int8).view(np.uint8)
        groups = num_groups(first, num_k, GROUP_SIZES[weight_format])
        size = rng.uniform(0.5, 2, (rows, groups)) * scale
        signs = rng.choice([-1.0, 1.0], size.shape)
        codes.append(drawn)
        scales.append(f32_to_bf16(np.float32(size * signs)))
    return Expert(*codes, *scales)


def make_shard(
    rng,
    *,
    experts=4,
    hidden=256,
    columns=64,
    offset=0,
    weight_format="e4m3-block128",
    expert_lo=0,
    n_routed_experts=0,
    **expert_kwargs,
) -> Shard:
    weights = LayerWeights(
        num_experts=experts,
        hidden_size=hidden,
        num_columns=columns,
        column_offset=offset,
        weight_format=weight_format,
    )
    made = [
        make_expert(
            rng,
            hidden=hidden,
            columns=columns,
            offset=offset,
            weight_format=weight_format,
            **expert_kwargs,
        )
        for _ in range(experts)
    ]
    for idx, expert in enumerate(made):
        weights.load_expert(idx, **vars(expert))
    weights.check()
    return Shard(made, weights, expert_lo, n_routed_experts or experts + expert_lo)


def make_rows(rng, shard: Shard, *, rows, topk=4):
    """hidden, ids (distinct within a row where there are enough), weights."""
    hidden = f32_to_bf16(
        rng.standard_normal((rows, shard.weights.hidden_size), dtype=np.float32)
    )
    ids = np.array(
        [
            rng.choice(shard.n_routed_experts, topk, shard.n_routed_experts < topk)
            for _ in range(rows)
        ],
        dtype=np.int32,
    ).reshape(rows, topk)
    return hidden, ids, rng.random((rows, topk), dtype=np.float32)


def _pairs(shard: Shard, ids: np.ndarray):
    """(local expert, slot, rows that have it there) in the documented order."""
    for local in range(len(shard.experts)):
        for slot in range(ids.shape[1]):
            (rows,) = np.nonzero(ids[:, slot] == local + shard.expert_lo)
            if len(rows):
                yield local, slot, rows


# --- float64 and its bound ----------------------------------------------------------


def grouped_codes(codes: np.ndarray, weight_format: str) -> np.ndarray:
    """The integers of int8 or int4 codes as files have them."""
    if weight_format == "int8-group128":
        return codes.view(np.int8).astype(np.float64)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return np.where(nibbles < 8, nibbles, nibbles - 16.0)


def scales_of_rows(scales, num_k, first, group_size) -> np.ndarray:
    """bf16 scales [rows][groups] -> float64 [rows][k]."""
    group = (first + np.arange(num_k)) // group_size - first // group_size
    return bf16_to_f32(scales).astype(np.float64)[:, group]


def dense_grouped(layer: LayerWeights, expert: Expert) -> list[np.ndarray]:
    """Gate, up and down in float64."""
    group_size = GROUP_SIZES[layer.weight_format]
    made = []
    for codes, scales, first in (
        (expert.gate, expert.gate_scale, 0),
        (expert.up, expert.up_scale, 0),
        (expert.down, expert.down_scale, layer.column_offset),
    ):
        values = grouped_codes(codes, layer.weight_format)
        made.append(values * scales_of_rows(scales, values.shape[1], first, group_size))
    return made


def _dense(shard: Shard, expert: Expert) -> list[np.ndarray]:
    if shard.weights.weight_format in GROUP_SIZES:
        return dense_grouped(shard.weights, expert)
    if shard.weights.weight_format == "bf16":
        return [
            bf16_to_f32(w).astype(np.float64)
            for w in (expert.gate, expert.up, expert.down)
        ]
    column = (
        shard.weights.column_offset + np.arange(shard.weights.num_columns)
    ) // BLOCK
    row = np.arange(shard.weights.hidden_size) // BLOCK
    return [
        E4M3[expert.gate] * expert.gate_scale.astype(np.float64)[np.ix_(column, row)],
        E4M3[expert.up] * expert.up_scale.astype(np.float64)[np.ix_(column, row)],
        E4M3[expert.down] * expert.down_scale.astype(np.float64)[np.ix_(row, column)],
    ]


def _dot_gamma(num_k: int, layer: LayerWeights) -> float:
    """Relative to the sum of absolute terms: the rounding errors of one dot product.

    A term passes at most 15 additions in its chain of 16 (products are exact and the
    first addition is to 0), 1 that joins even and odd, those that join the tiles of a
    segment (one less than it has), 1 multiplication by the scale and one addition for
    each segment; a segment may be cut by the shard's phase, hence the + 1.
    """
    segment_k = _segment_k(layer)
    steps = 15 + 1 + (segment_k // TILE_K - 1) + 1 + (-(-num_k // segment_k) + 1)
    return steps * U32 / (1 - steps * U32)


def reference_f64(shard: Shard, hidden, ids, topk_weights):
    """The layer in float64, and how far the kernel may be from it, element by element.

    With g, u in error by dg, du, |silu'| <= 1.1 and expf within 8 roundings, act is
    off by 1.1 dg (|u| + du) + |silu(g)| du + 8 U32 |act|, then rounded to bf16 (U16).
    down carries that through its absolute weights and adds its own dot error; the sum
    over K experts adds one multiplication and K additions. Results below 2^-126 flush
    to zero: at most 2^-126 for each of the operations behind an output.
    """
    x = bf16_to_f32(hidden).astype(np.float64)
    out = np.zeros(hidden.shape)
    bound = np.full(hidden.shape, 1e-30)
    num_terms = ids.shape[1]
    for local, slot, rows in _pairs(shard, ids):
        gate, up, down = (w.T for w in _dense(shard, shard.experts[local]))
        xr = x[rows]
        g, u = xr @ gate, xr @ up
        gamma = _dot_gamma(shard.weights.hidden_size, shard.weights)
        dg = gamma * (np.abs(xr) @ np.abs(gate)) + 1e-35
        du = gamma * (np.abs(xr) @ np.abs(up)) + 1e-35
        silu = g / (1 + np.exp(-np.clip(g, -700, 700)))
        act = silu * u
        dact = 1.1 * dg * (np.abs(u) + du) + np.abs(silu) * du
        dact += (8 * U32 + U16 * (1 + U32)) * (np.abs(act) + dact)
        d = act @ down
        dd = dact @ np.abs(down)
        dd += _dot_gamma(shard.weights.num_columns, shard.weights) * (
            (np.abs(act) + dact) @ np.abs(down)
        )
        weight = topk_weights[rows, slot, None].astype(np.float64)
        out[rows] += weight * d
        size = np.abs(weight) * (np.abs(d) + dd)
        bound[rows] += np.abs(weight) * dd + (num_terms + 1) * U32 * size
    return out, bound


# --- float32 in the documented order ------------------------------------------------


def _segment_k(layer: LayerWeights) -> int:
    """The k that share a scale; bf16 is summed as if it had the scales of e4m3."""
    return GROUP_SIZES.get(layer.weight_format, BLOCK)


def _segments(length: int, phase: int, segment_k: int):
    begin = 0
    while begin < length:
        end = (phase + begin) // segment_k * segment_k + segment_k - phase
        yield begin, min(length, end)
        begin = end


def _ordered_dot(weights, scales, x, phase, segment_k):
    """x @ weights.T as kernel_table.h orders it; `scales` is [columns][segments]."""
    total = np.zeros((len(x), len(weights)), np.float32)
    for segment, (begin, end) in enumerate(
        _segments(weights.shape[1], phase, segment_k)
    ):
        acc = np.zeros_like(total)
        for k in range(begin, end, TILE_K):
            parity = [np.zeros_like(total), np.zeros_like(total)]
            for i in range(k, min(k + TILE_K, end)):
                parity[i % 2] = parity[i % 2] + x[:, i, None] * weights[:, i]
            acc = acc + (parity[0] + parity[1])
        total = total + scales[:, segment] * acc
    return total


def _exp(x):
    one = np.float32
    x = np.clip(x, one(-87), one(88))
    shifted = x * one(1.44269504088896341) + one(12582912)
    n = shifted - one(12582912)
    r = x - n * one(0.693359375)
    r = r - n * one(-2.12194440e-4)
    p = np.full_like(x, 1.9875691500e-4)
    for c in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = p * r + one(c)
    p = p * (r * r) + r + one(1)
    return (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)


def _ordered_act(g, u):
    e = np.where(g < -88, np.float32(np.inf), _exp(-g))
    return bf16_to_f32(f32_to_bf16(g / (np.float32(1) + e) * u))


def reference_bits(shard: Shard, hidden, ids, topk_weights):
    """The kernel's float32 output, bit by bit."""
    x = bf16_to_f32(hidden)
    layer = shard.weights
    segment_k = _segment_k(layer)
    out = np.zeros(hidden.shape, np.float32)
    for local, slot, rows in _pairs(shard, ids):
        gate, up, down = _weights_and_scales(layer, shard.experts[local])
        act = _ordered_act(
            _ordered_dot(*gate, x[rows], 0, segment_k),
            _ordered_dot(*up, x[rows], 0, segment_k),
        )
        d = _ordered_dot(*down, act, layer.column_offset % segment_k, segment_k)
        out[rows] = out[rows] + topk_weights[rows, slot, None] * d
    return out


def _weights_and_scales(layer: LayerWeights, e: Expert):
    """Of gate, up and down: float32 weights [rows][k] and scales [rows][segments]."""
    weights = e.gate, e.up, e.down
    scales = e.gate_scale, e.up_scale, e.down_scale
    if layer.weight_format in GROUP_SIZES:
        values = [np.float32(grouped_codes(w, layer.weight_format)) for w in weights]
        return zip(values, map(bf16_to_f32, scales), strict=True)
    if layer.weight_format == "bf16":
        values = [bf16_to_f32(w) for w in weights]
        ones = [np.ones((len(v), v.shape[1]), np.float32) for v in values]
        return zip(values, ones, strict=True)
    column = (layer.column_offset + np.arange(layer.num_columns)) // BLOCK
    row_block = np.arange(layer.hidden_size) // BLOCK
    fix = np.float32(256)  # weights times 2^-8, scales times 2^8: exact
    values = [np.float32(E4M3[w] / 256) for w in weights]
    rows = column, column, row_block
    return zip(
        values, [s[r] * fix for s, r in zip(scales, rows, strict=True)], strict=True
    )


def assert_same_bits(got, expected):
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
