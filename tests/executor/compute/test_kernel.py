"""The kernel computes the documented arithmetic: on every instruction set, for every
shape, row count, thread count and order of calls, to the bit."""

import threading
from pathlib import Path

import numpy as np
import pytest

from testing.ducks.moe_reference import (
    E4M3,
    Expert,
    Shard,
    assert_same_bits,
    make_rows,
    make_shard,
    random_codes,
    reference_bits,
    reference_f64,
)
from vllm_duck.executor.compute.kernel import (
    WEIGHT_FORMATS,
    LayerWeights,
    MoeKernel,
    supported_isas,
)
from vllm_duck.executor.weights.checkpoint import Checkpoint

ISAS = supported_isas()
FORMATS = WEIGHT_FORMATS
# hidden, columns, offset: aligned; half a block; both ends inside blocks; a tail of 16
# in hidden and in columns; the smallest; three segments.
SHAPES = [
    (256, 128, 0),
    (256, 64, 64),
    (384, 144, 80),
    (272, 48, 16),
    (16, 16, 112),
    (144, 272, 48),
]


def subnormals(rng, shape):
    return random_codes(rng, shape, 0, 8) | (random_codes(rng, shape) & 0x80)


def largest(rng, shape):
    return rng.choice(np.array([0x7E, 0xFE], np.uint8), shape)


def zeros(rng, shape):
    return rng.choice(np.array([0x00, 0x80], np.uint8), shape)


def mostly_zeros(rng, shape):
    return np.where(rng.random(shape) < 0.99, 0, random_codes(rng, shape)).astype(
        np.uint8
    )


def assert_within_bound(shard, kernel, rows):
    out = shard.forward(kernel, *rows)
    expected, bound = reference_f64(shard, *rows)
    assert np.isfinite(bound).all()
    excess = np.abs(out - expected) - bound
    assert excess.max() <= 0, f"off by {excess.max()} more than the bound"


# --- against float64 ----------------------------------------------------------------


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_layers_are_within_the_derived_bound(kernel, shape, weight_format):
    rng = np.random.default_rng(1)
    hidden, columns, offset = shape
    shard = make_shard(
        rng, hidden=hidden, columns=columns, offset=offset, weight_format=weight_format
    )
    for rows in (1, 2, 5, 40):
        assert_within_bound(shard, kernel, make_rows(rng, shard, rows=rows))


@pytest.mark.parametrize("codes", [subnormals, largest, zeros, mostly_zeros])
@pytest.mark.parametrize("scale", [1e-3, 1e-20, 1e3])
def test_adversarial_codes_and_scales_are_within_the_derived_bound(
    kernel, codes, scale
):
    rng = np.random.default_rng(2)
    shard = make_shard(rng, hidden=272, columns=48, offset=16, codes=codes, scale=scale)
    for rows in (2, 9):
        assert_within_bound(shard, kernel, make_rows(rng, shard, rows=rows))


@pytest.mark.parametrize("num_rows", [3, 17, 33, 100])
def test_one_expert_chosen_by_all_rows_is_within_the_derived_bound(kernel, num_rows):
    rng = np.random.default_rng(3)
    shard = make_shard(rng)
    hidden, ids, weights = make_rows(rng, shard, rows=num_rows, topk=1)
    ids[:] = 2
    assert_within_bound(shard, kernel, (hidden, ids, weights))


def test_bundled_weights_are_within_the_derived_bound(kernel, tiny_model):
    if not Path(tiny_model, "config.json").exists():
        pytest.skip("no bundled model in this checkout")
    shard = _load_bundled_layer(tiny_model)
    rng = np.random.default_rng(4)
    for rows in (1, 2, 24):
        assert_within_bound(shard, kernel, make_rows(rng, shard, rows=rows))


def _load_bundled_layer(model: Path) -> Shard:
    """The second half of the columns of the first MoE layer's first four experts."""
    checkpoint = Checkpoint(model)
    lo, hi = checkpoint.moe_intermediate_size // 2, checkpoint.moe_intermediate_size
    weights = LayerWeights(
        num_experts=4,
        hidden_size=checkpoint.hidden_size,
        num_columns=hi - lo,
        column_offset=lo % 128,
        weight_format="e4m3-block128",
    )
    prefix = f"model.layers.{checkpoint.config['first_k_dense_replace']}.mlp.experts"
    half, blocks = slice(lo, hi), slice(lo // 128, -(-hi // 128))
    experts = []
    for idx in range(4):
        gate, up, down = (
            _read_tensor(checkpoint, f"{prefix}.{idx}.{name}_proj.weight", np.uint8)
            for name in ("gate", "up", "down")
        )
        gate_scale, up_scale, down_scale = (
            _read_tensor(
                checkpoint, f"{prefix}.{idx}.{name}_proj.weight_scale_inv", np.float32
            )
            for name in ("gate", "up", "down")
        )
        experts.append(
            Expert(
                gate[half],
                up[half],
                down[:, half],
                gate_scale[blocks],
                up_scale[blocks],
                down_scale[:, blocks].copy(),
            )
        )
        weights.load_expert(idx, **vars(experts[-1]))
    return Shard(experts, weights, 0, checkpoint.config["n_routed_experts"])


def _read_tensor(checkpoint: Checkpoint, name: str, dtype) -> np.ndarray:
    place = checkpoint.place_of(name)
    count = int(np.prod(place.shape))
    flat = np.fromfile(place.path, dtype, count, offset=place.begin)
    return flat.reshape(place.shape)


# --- the documented order -----------------------------------------------------------


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_documented_order(kernel, shape, weight_format):
    rng = np.random.default_rng(5)
    hidden, columns, offset = shape
    shard = make_shard(
        rng, hidden=hidden, columns=columns, offset=offset, weight_format=weight_format
    )
    for num_rows in (1, 3, 7, 35):
        rows = make_rows(rng, shard, rows=num_rows)
        assert_same_bits(shard.forward(kernel, *rows), reference_bits(shard, *rows))


@pytest.mark.parametrize("codes", [subnormals, largest, mostly_zeros])
def test_adversarial_codes_follow_the_documented_order(kernel, codes):
    rng = np.random.default_rng(6)
    shard = make_shard(rng, codes=codes)
    for num_rows in (2, 20):
        rows = make_rows(rng, shard, rows=num_rows)
        # + 0: the reference's zeros may be negative.
        assert_same_bits(
            shard.forward(kernel, *rows) + 0, reference_bits(shard, *rows) + 0
        )


def test_large_gates_of_either_sign_saturate(kernel):
    rng = np.random.default_rng(7)
    shard = make_shard(rng, scale=30.0)
    rows = make_rows(rng, shard, rows=6)
    out = shard.forward(kernel, *rows)
    assert np.isfinite(out).all()
    assert_same_bits(out, reference_bits(shard, *rows))


@pytest.mark.parametrize("exponent", [14, 15, 16, 60, 110])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 20])
def test_huge_activations_follow_the_documented_order(kernel, exponent, num_rows):
    # The fp32 copies of activations are scaled by a power of two, if all of them fit.
    rng = np.random.default_rng(11)
    shard = make_shard(rng, scale=2.0 ** (-exponent / 2 - 10))
    hidden, ids, weights = make_rows(rng, shard, rows=num_rows)
    hidden[:, :100] += np.uint16(exponent << 7)
    rows = hidden, ids, weights
    out = shard.forward(kernel, *rows)
    assert np.isfinite(out).all()
    assert np.abs(out).max() > 2.0 ** (exponent / 4)
    assert_same_bits(out, reference_bits(shard, *rows))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 20])
def test_a_huge_activation_leaves_the_small_ones_their_bits(kernel, num_rows):
    def first_is_zero(rng, shape):
        codes = random_codes(rng, shape)
        codes[:, 0] = 0
        return codes

    rng = np.random.default_rng(13)
    shard = make_shard(rng, codes=first_is_zero)
    hidden, ids, weights = make_rows(rng, shard, rows=num_rows)
    hidden[:, 0] = 0
    without = shard.forward(kernel, hidden, ids, weights)
    hidden[::2, 0] = 0x7F00  # 2^127, whose weights are 0
    assert np.abs(without).max() > 0
    assert_same_bits(shard.forward(kernel, hidden, ids, weights), without)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 20])
def test_what_overflows_does_so_in_every_kernel(kernel, num_rows):
    rng = np.random.default_rng(14)
    shard = make_shard(rng, codes=largest, scale=1e3)
    hidden, ids, weights = make_rows(rng, shard, rows=num_rows)
    hidden[0] = 0x7E80  # 2^126
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference_bits(shard, hidden, ids, weights)
    out = shard.forward(kernel, hidden, ids, weights)
    assert not np.isfinite(expected[0]).any()
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))
    assert_same_bits(out[1:], expected[1:])


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 20])
def test_a_row_that_is_not_finite_shows_and_stays_alone(kernel, value, num_rows):
    rng = np.random.default_rng(12)
    shard = make_shard(rng)
    hidden, ids, weights = make_rows(rng, shard, rows=num_rows + 1)
    clean = shard.forward(kernel, hidden, ids, weights)
    hidden[-1, 3] = value
    out = shard.forward(kernel, hidden, ids, weights)
    assert not np.isfinite(out[-1]).any()
    assert_same_bits(out[:-1], clean[:-1])


@pytest.mark.parametrize("position", [0, 1, 2, 3, 15, 16, 31])
@pytest.mark.parametrize("num_rows", [1, 9, 20])
def test_every_e4m3_code_is_decoded_exactly(kernel, position, num_rows):
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    hidden, columns = 256, 32
    # gate . x = 128, where silu is the identity; up . x = 1/128; so act is 1 at
    # `position`, and down's column is the output.
    gate = np.zeros((columns, hidden), np.uint8)
    gate[position, 0] = 0x70
    down = np.zeros((hidden, columns), np.uint8)
    down[: len(codes), position] = codes
    one = np.ones((1, 2), np.float32)
    expert = {"gate": gate, "up": gate, "down": down, "gate_scale": one}
    weights = LayerWeights(
        num_experts=1,
        hidden_size=hidden,
        num_columns=columns,
        column_offset=0,
        weight_format="e4m3-block128",
    )
    weights.load_expert(0, **expert, up_scale=one / 2**14, down_scale=one.T.copy())
    x = np.zeros((num_rows, hidden), np.uint16)
    x[:, 0] = 0x3F80
    ids = np.zeros((num_rows, 1), np.int32)
    out = Shard([], weights, 0, 1).forward(kernel, x, ids, ids.astype(np.float32) + 1)
    for row in out:
        np.testing.assert_array_equal(row[: len(codes)], E4M3[codes])


def test_every_instruction_set_gives_the_same_bits():
    rng = np.random.default_rng(8)
    shard = make_shard(rng, hidden=1024, columns=96, offset=96, experts=3)
    rows = make_rows(rng, shard, rows=50, topk=2)
    outs = [shard.forward(MoeKernel(num_threads=1, isa=isa), *rows) for isa in ISAS]
    for out in outs[1:]:
        assert_same_bits(out, outs[0])


# --- a row is alone -----------------------------------------------------------------


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_has_the_same_bits_at_every_row_and_thread_count(kernel, weight_format):
    rng = np.random.default_rng(9)
    shard = make_shard(
        rng, experts=6, columns=80, offset=32, weight_format=weight_format
    )
    hidden, ids, weights = make_rows(rng, shard, rows=300)
    together = shard.forward(kernel, hidden, ids, weights)
    for num_threads in (1, 2, 3, 5):
        other = MoeKernel(num_threads=num_threads, isa=kernel.isa)
        for count in (1, 2, 3, 4, 5, 16, 17, 33, 130):
            part = slice(7, 7 + count)
            out = shard.forward(other, hidden[part], ids[part], weights[part])
            assert_same_bits(out, together[part])


def test_a_row_has_the_same_bits_wherever_it_stands_in_the_call(kernel):
    rng = np.random.default_rng(10)
    shard = make_shard(rng)
    hidden, ids, weights = make_rows(rng, shard, rows=40)
    straight = shard.forward(kernel, hidden, ids, weights)
    order = rng.permutation(40)
    shuffled = shard.forward(kernel, hidden[order], ids[order], weights[order])
    assert_same_bits(shuffled, straight[order])


def test_calls_longer_than_one_cut_have_the_same_bits(kernel):
    rng = np.random.default_rng(11)
    shard = make_shard(rng, hidden=16, columns=16, experts=2)
    hidden, ids, weights = make_rows(rng, shard, rows=4100, topk=2)
    together = shard.forward(kernel, hidden, ids, weights)
    for row in (0, 2047, 2048, 4099):
        part = slice(row, row + 1)
        alone = shard.forward(kernel, hidden[part], ids[part], weights[part])
        assert_same_bits(alone, together[part])


def test_the_order_of_experts_in_a_row_does_not_matter(kernel):
    rng = np.random.default_rng(12)
    shard = make_shard(rng)
    hidden, ids, weights = make_rows(rng, shard, rows=5)
    straight = shard.forward(kernel, hidden, ids, weights)
    back = shard.forward(kernel, hidden, ids[:, ::-1].copy(), weights[:, ::-1].copy())
    assert_same_bits(back, straight)


def test_an_expert_named_twice_counts_twice(kernel):
    rng = np.random.default_rng(13)
    shard = make_shard(rng)
    hidden, _, weights = make_rows(rng, shard, rows=7)
    ids = np.array([[3, 1, 3, 3]] * 7, np.int32)
    rows = (hidden, ids, weights)
    assert_same_bits(shard.forward(kernel, *rows), reference_bits(shard, *rows))


def test_a_nan_row_leaves_its_neighbours_alone(kernel):
    rng = np.random.default_rng(14)
    shard = make_shard(rng, hidden=272, columns=48, offset=16)
    for num_rows in (2, 6, 40):
        hidden, ids, weights = make_rows(rng, shard, rows=num_rows)
        ids[1:] = ids[0]
        clean = shard.forward(kernel, hidden, ids, weights)
        hidden[1, 5] = 0x7FC0
        dirty = shard.forward(kernel, hidden, ids, weights)
        assert np.isnan(dirty[1]).all()
        others = np.arange(num_rows) != 1
        assert_same_bits(dirty[others], clean[others])


def test_calls_from_several_threads_have_the_same_bits(kernel):
    rng = np.random.default_rng(15)
    shard = make_shard(rng)
    calls = [make_rows(rng, shard, rows=n) for n in (1, 2, 9, 30)]
    expected = [shard.forward(kernel, *rows) for rows in calls]
    failures = []

    def repeat(rows, out):
        for _ in range(50):
            got = shard.forward(kernel, *rows)
            if not np.array_equal(got.view(np.uint32), out.view(np.uint32)):
                failures.append(len(got))

    pairs = zip(calls, expected, strict=True)
    threads = [threading.Thread(target=repeat, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
