"""A row's bits are its own: whatever the company, the threads, the instruction set."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from testing import compiled, torch_host
from testing.attention_pair import TOPK, make_config, make_pair
from testing.filled import filled
from testing.host_threads import isa, using
from testing.paged_world import BLOCK_SIZE, make_batch, run_attention
from testing.torch_host import numpy_bits
from vllm_duck.errors import DuckConfigError, DuckShapeError
from vllm_duck.executor.system import cpus
from vllm_duck.models.cpu import _host, threads
from vllm_duck.models.cpu.linear import Linear, Mlp, Norm
from vllm_duck.models.cpu.moe import Router
from vllm_duck.models.cpu.threads import configure, current
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.rope import Rope

ISAS = _host.supported_isas()
MACHINES = [(threads, name) for threads in (1, 2, 3) for name in ISAS]
# (out, in): full tiles; neither full; fewer than a tile; a fused down projection.
SIZES = [(64, 64), (33, 72), (4, 40), (964, 256)]


def all_threads(num_threads, name):
    """However small the work."""
    return using(num_threads, name, work_per_thread=1)


def bits(x):
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x.view(torch.int16)


def make_linear(out_features, in_features):
    torch.manual_seed(out_features)
    linear = Linear(in_features, out_features)
    (weight,) = filled(linear, 0.3).values()
    return linear, weight


def dot_in_order(x, weight):
    """In the order of additions of csrc/host/gemm/gemm.h, one product at a time."""
    pad = -x.shape[1] % 32
    x, weight = (
        torch.nn.functional.pad(part.float(), (0, pad)).numpy() for part in (x, weight)
    )
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for tile in range(0, x.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(tile, tile + 32, 2):
            even += np.multiply.outer(x[:, k], weight[:, k])
            odd += np.multiply.outer(x[:, k + 1], weight[:, k + 1])
        total += even + odd
    return torch.from_numpy(total)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ISAS)
def test_a_linear_adds_in_the_documented_order(size, name):
    linear, weight = make_linear(*size)
    x = torch.randn(37, size[1]).bfloat16()
    expected = dot_in_order(x, weight).bfloat16()
    with using(2, name):
        assert isa() == name
        assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_linear_gives_a_row_the_same_bits_in_any_company(machine):
    linear, _ = make_linear(964, 256)
    x = torch.randn(70, 256).bfloat16()
    with all_threads(*machine):
        together = linear(x)
        for begin, end in [(0, 1), (1, 3), (3, 20), (20, 37), (37, 70)]:
            assert torch.equal(linear(x[begin:end]), together[begin:end])


def make_modules(*, is_coded=False):
    torch.manual_seed(0)
    config = make_config(hidden_size=120, n_routed_experts=12)
    dims = Dimensions.from_hf_config(config)
    norm, mlp, router = Norm(120, 1e-6), Mlp(120, 72), Router(dims)
    filled(norm, 0.2)
    # Beyond bf16, so that the router needs all of its parts.
    filled(router, 0.2)
    return norm, mlp, router, filled(mlp, 0.2, is_coded=is_coded)


def run_modules(modules, x):
    norm, mlp, router, _ = modules
    ids, weights = router(numpy_bits(x))
    return [
        bits(norm(x)),
        torch.from_numpy(mlp(numpy_bits(x))),
        torch.from_numpy(mlp.add_to(numpy_bits(x), numpy_bits(x))),
        torch.from_numpy(ids),
        torch.from_numpy(weights),
    ]


@pytest.mark.parametrize("is_coded", [False, True], ids=["bf16", "e4m3"])
def test_the_other_modules_give_the_same_bits_everywhere(is_coded):
    modules = make_modules(is_coded=is_coded)
    x = torch.randn(600, 120).bfloat16()
    with using(1, "portable"):
        expected = run_modules(modules, x)
    for machine in MACHINES:
        with all_threads(*machine):
            for begin, end in [(0, 600), (0, 1), (17, 19), (30, 64)]:
                got = run_modules(modules, x[begin:end])
                for part, whole in zip(got, expected, strict=True):
                    assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("is_coded", [False, True], ids=["bf16", "e4m3"])
def test_mlp_and_norm_match_torch(is_coded):
    norm, mlp, _, weights = modules = make_modules(is_coded=is_coded)
    x = torch.randn(9, 120).bfloat16()
    gate_up = torch.cat([weights["gate_proj"], weights["up_proj"]]).float()
    expected = torch_host.mlp(x.float(), gate_up, weights["down_proj"].float())
    got = run_modules(modules, x)[1]
    # The activation is rounded to 8 bits; 72 of them average out.
    assert (got - expected).norm() < 2**-8 * expected.norm()
    normed = torch.nn.functional.rms_norm(x.float(), (120,), norm.weight.float(), 1e-6)
    torch.testing.assert_close(norm(x).float(), normed, rtol=2**-8, atol=0)


LATENT_ROWS = Path(__file__).with_name("latent_rows.cpp")


def written(name, x):
    """The row of x [size] fp32 in an fp8 latent cache, without its rope part."""
    row = np.zeros(len(x) + len(x) // 128 * 4, np.uint8)
    library = compiled.load(LATENT_ROWS, f"-DSET_{name}")
    x = np.ascontiguousarray(x, np.float32)
    library.write_latent(len(x), memory(x), memory(row))
    return row


def read(name, row):
    """The numbers of such a row, [size] bf16."""
    size = len(row) * 128 // 132
    out = np.zeros(size, np.uint16)
    library = compiled.load(LATENT_ROWS, f"-DSET_{name}")
    library.read_latent(size, memory(row), memory(out))
    return torch.from_numpy(out).view(torch.bfloat16)


def memory(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("name", ISAS)
def test_every_e4m3_code_is_read_and_written_exactly(name):
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    scales = torch.tensor([1.0, 0.5])
    row = torch.cat([codes, scales.view(torch.uint8)]).numpy()
    expected = numbers * scales.repeat_interleave(128)
    torch.testing.assert_close(
        read(name, row).float(), expected, rtol=0, atol=0, equal_nan=True
    )
    # Both tiles hold 448, so their scales are 1.
    finite = numbers.nan_to_num(448.0)
    row = written(name, finite.numpy())
    assert np.array_equal(row[:127], codes[:127].numpy())
    assert torch.equal(read(name, row).float(), finite)


@pytest.mark.parametrize("name", ISAS)
def test_quantisation_is_torch_s_to_the_bit(name):
    torch.manual_seed(1)
    for magnitude in (1e-30, 1e-3, 1.0, 1e4):
        x = torch.randn(512) * magnitude * torch.rand(512) ** 8
        x[:128] = 0
        expected = torch.cat(torch_host.quantize(x[None]), -1)
        assert np.array_equal(written(name, x.numpy()), expected[0].numpy())


class Session:
    """Some sequences that are fed to one attention block, step by step."""

    def __init__(self, ours, world, sequences):
        world.allocate()
        self.ours, self.sequences = ours, sequences
        self.rope = Rope(ours.dims.rope, ours.dims.qk_rope_head_dim)
        self.done = [0] * len(sequences)
        blocks = torch.randperm(
            world.num_blocks, generator=torch.Generator().manual_seed(3)
        )
        per_request = -(-max(map(len, sequences)) // BLOCK_SIZE)
        count = per_request * len(sequences)
        self.table = blocks[:count].view(len(sequences), per_request)

    def step(self, new, num_padding=0, split=None):
        """new[r] tokens of each request; split[r] of them go into a first lane."""
        active = [r for r, count in enumerate(new) if count]
        counts = [new[r] for r in active]
        pieces, positions = [], []
        for r in active:
            span = slice(self.done[r], self.done[r] + new[r])
            pieces.append(self.sequences[r][span])
            positions.append(torch.arange(span.start, span.stop))
            self.done[r] += new[r]
        padding = torch.full((num_padding, self.ours.dims.hidden_size), torch.nan)
        hidden = torch.cat([*pieces, padding.bfloat16()])
        rotations = self.rope.rotations(
            torch.cat([*positions, torch.zeros(num_padding, dtype=torch.int64)])
        )
        lens = [self.done[r] for r in active]
        batch = make_batch(counts, lens, self.table[active])
        if split is None:
            out = self._attend(hidden, rotations, batch)[: batch.num_tokens]
            return dict(zip(active, out.split(counts), strict=True))
        return self._attend_lanes(hidden, rotations, batch, [split[r] for r in active])

    def _attend_lanes(self, hidden, rotations, batch, split):
        counts = [request.num_rows for request in batch.requests]
        is_first = torch.cat(
            [torch.arange(n) < s for n, s in zip(counts, split, strict=True)]
        )
        out = torch.empty(batch.num_tokens, 2 * hidden.shape[1], dtype=torch.int16)
        lanes = [(is_first, [0] * len(split), split), (~is_first, split, counts)]
        for rows, begin, end in lanes:
            lane = batch.lane(begin, end)
            out[rows] = self._attend(hidden[rows], rotations[rows], lane)
        return dict(enumerate(out.split(counts)))

    def _attend(self, hidden, rotations, batch):
        outs = run_attention(self.ours, hidden, rotations, batch)
        return torch.cat(list(map(bits, outs)), 1)


def feed(ours, world, sequences, steps, **options):
    session = Session(ours, world, sequences)
    parts = [[] for _ in sequences]
    for new in steps:
        for r, rows in session.step(new, **options).items():
            parts[r].append(rows)
    return [torch.cat(rows) for rows in parts]


CHUNKS = [[64, 5, 0], [20, 2, 90], [9, 23, 33], *[[1, 1, 1]] * 7]


@pytest.mark.parametrize("is_coded", [False, True], ids=["bf16 weights", "e4m3"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_chunks_company_threads_and_isa_leave_attention_s_bits_alone(
    kv_dtype, is_coded
):
    _, ours, world = make_pair(make_config(), kv_dtype, is_coded=is_coded)
    lengths = [100, 37, 20 * TOPK]
    sequences = [torch.randn(n, 128).bfloat16() for n in lengths]
    with using(1, "portable"):
        alone = [feed(ours, world, [s], [[len(s)]])[0] for s in sequences]
    for machine in MACHINES:
        with all_threads(*machine):
            mixed = feed(ours, world, sequences, CHUNKS)
            together = feed(ours, world, sequences, [lengths])
        for r, expected in enumerate(alone):
            assert torch.equal(mixed[r], expected[: len(mixed[r])])
            assert torch.equal(together[r], expected)


def test_padding_rows_change_nothing_and_attend_to_nothing():
    _, ours, world = make_pair(make_config())
    sequences = [torch.randn(70, 128).bfloat16()]
    expected = feed(ours, world, sequences, [[70]])
    got = feed(ours, world, sequences, [[40], [30]], num_padding=5)
    assert torch.equal(got[0], expected[0])
    hidden = torch.randn(3, 128).bfloat16()
    batch = make_batch([1], [71], torch.arange(5)[None])
    rotations = Rope(ours.dims.rope, 32).rotations(torch.tensor([70, 0, 0]))
    residual, _ = run_attention(ours, hidden, rotations, batch)
    assert torch.equal(residual[1:], hidden[1:])


def test_lanes_give_each_row_the_bits_of_the_whole_step():
    _, ours, world = make_pair(make_config(), kv_dtype="fp8")
    sequences = [torch.randn(n, 128).bfloat16() for n in (90, 50, 60)]
    steps = [([60, 40, 50], [30, 40, 0]), ([2, 2, 1], [1, 1, 1])]
    session = Session(ours, world, sequences)
    whole = [session.step(new) for new, _ in steps]
    session = Session(ours, world, sequences)
    for (new, split), expected in zip(steps, whole, strict=True):
        got = session.step(new, split=split)
        assert all(torch.equal(got[r], expected[r]) for r in range(3))


def test_of_equal_scores_the_later_positions_win():
    config = make_config(first_k_dense_replace=0)
    oracle, _, _ = make_pair(config)
    oracle.indexer.weights_proj.weight.data.zero_()
    _, ours, world = make_pair(config, weights=oracle)
    hidden = torch.randn(8 * TOPK, 128).bfloat16()
    (got,) = feed(ours, world, [hidden], [[8 * TOPK]])
    # The last TOPK positions are a window: what came before it cannot matter.
    last = TOPK + 5
    hidden = torch.cat([torch.randn(8 * TOPK - last, 128).bfloat16(), hidden[-last:]])
    (other,) = feed(ours, world, [hidden], [[8 * TOPK]])
    assert torch.equal(got[-5:], other[-5:])
    assert not torch.equal(got[-last:-5], other[-last:-5])


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_many_heads_match_the_reference(name, kv_dtype):
    config = make_config(
        num_attention_heads=20, num_key_value_heads=20, index_n_heads=24, q_lora_rank=72
    )
    oracle, ours, world = make_pair(config, kv_dtype=kv_dtype)
    weights = {key: p.data for key, p in oracle.named_parameters()}
    ones = torch.ones(config.hidden_size)
    weights |= {
        f"{n}.weight": ones for n in ("input_layernorm", "post_attention_layernorm")
    }
    num_tokens = 8 * TOPK
    hidden = torch.randn(num_tokens, 128).bfloat16()
    rotations = Rope(ours.dims.rope, 32).rotations(torch.arange(num_tokens))
    batch = make_batch([num_tokens], [num_tokens], torch.randperm(8)[None])
    reference = torch_host.TorchAttention(
        ours.dims,
        weights,
        latent_format=ours.latent_cache.format,
        index_format=ours.index_cache.format,
        num_slots=world.num_blocks * BLOCK_SIZE,
    )
    expected, _ = reference(hidden.float(), rotations, batch)
    with all_threads(2, name):
        residual, _ = run_attention(ours, hidden, rotations, batch)
    errors = (residual.float() - expected).norm(dim=1)
    errors /= (expected - hidden.float()).norm(dim=1)
    # Roundings of queries and weights to bf16; near-ties of the selection in a few.
    assert errors.median() < 0.02
    assert (errors > 0.1).float().mean() < 0.15


def test_few_rows_share_their_heads_out_without_a_trace():
    config = make_config(num_attention_heads=40, num_key_value_heads=40)
    _, ours, world = make_pair(config)
    sequences = [torch.randn(5 * TOPK, 128).bfloat16()]
    with using(1):
        (expected,) = feed(ours, world, sequences, [[5 * TOPK]])
    for num_threads in (2, 3, 7):
        with all_threads(num_threads, ""):
            steps = [[5 * TOPK - 3], [1], [2]]
            assert torch.equal(feed(ours, world, sequences, steps)[0], expected)


def test_calls_from_several_threads_take_turns():
    linear, _ = make_linear(964, 256)
    x = torch.randn(64, 256).bfloat16()
    expected = linear(x)
    with all_threads(2, ""), ThreadPoolExecutor(4) as callers:
        results = list(callers.map(linear, [x[:n] for n in (1, 7, 64) * 20]))
    assert all(torch.equal(got, expected[: len(got)]) for got in results)


def test_what_cannot_run_is_refused(monkeypatch):
    with pytest.raises(DuckConfigError, match="VLLM_DUCK_ISA must be one of .*'mmx'"):
        configure(1, "mmx")
    with pytest.raises(DuckConfigError, match="num_threads must be >= 1"):
        configure(0)
    linear, _ = make_linear(4, 40)
    with pytest.raises(DuckShapeError, match=r"x must be \[T, 40\] bf16 on the CPU"):
        linear(torch.zeros(2, 40))


def test_threads_by_default_are_torch_s_within_the_quota(monkeypatch):
    asked = []
    monkeypatch.setattr(threads, "_current", None)
    monkeypatch.setattr(threads, "_make", lambda num, *how: asked.append(num) or 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(cpus, "cpu_quota", lambda root: 6.5)
    current()
    assert asked == [6]
