"""The byte layouts of the two caches, as the kernels write and read them."""

import pytest
import torch

from testing import torch_host
from testing.attention_pair import make_config, make_pair
from testing.paged_world import BLOCK_SIZE, make_batch, run_attention
from vllm_duck.errors import DuckConfigError
from vllm_duck.models.kv_format import IndexFormat, LatentFormat
from vllm_duck.models.rope import Rope


def test_official_sizes_take_the_official_bytes():
    assert LatentFormat(512, 64, "fp8").token_bytes == 656
    assert IndexFormat(128, "fp8").token_bytes == 132
    assert LatentFormat(512, 64, "bf16").token_bytes == 1152
    assert IndexFormat(128, "bf16").token_bytes == 256


def test_fp8_refuses_sizes_without_whole_tiles():
    with pytest.raises(DuckConfigError, match="kv_lora_rank must be a multiple of 128"):
        LatentFormat(96, 64, "fp8")
    with pytest.raises(DuckConfigError, match="index_head_dim must be 128"):
        IndexFormat(64, "fp8")


def write_tokens(kv_dtype, num_tokens=40):
    """Rows that our block and the reference wrote for the same tokens."""
    config = make_config()
    oracle, ours, world = make_pair(config, kv_dtype)
    hidden = torch.randn(num_tokens, config.hidden_size).bfloat16()
    table = torch.arange(8)[None].flip(1)
    batch = make_batch([num_tokens], [num_tokens], table)
    rotations = Rope(ours.dims.rope, 32).rotations(torch.arange(num_tokens))
    run_attention(ours, hidden, rotations, batch)
    weights = {name: p.data for name, p in oracle.named_parameters()}
    weights["input_layernorm.weight"] = torch.ones(config.hidden_size)
    weights["post_attention_layernorm.weight"] = torch.ones(config.hidden_size)
    reference = torch_host.TorchAttention(
        ours.dims,
        weights,
        latent_format=ours.latent_cache.format,
        index_format=ours.index_cache.format,
        num_slots=world.num_blocks * BLOCK_SIZE,
    )
    reference(hidden.float(), rotations, batch)
    return ours, reference, batch


def cache_rows(cache):
    return cache.kv_cache.view(-1, cache.format.token_bytes)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_cached_keys_are_the_reference_s_within_rounding(kv_dtype):
    ours, reference, batch = write_tokens(kv_dtype)
    slots = batch.slots
    latent = ours.latent_cache.format
    got = torch_host.unpack_latent(latent, cache_rows(ours.latent_cache)[slots])
    expected = torch_host.unpack_latent(latent, reference.latent_rows[slots])
    # A value at the edge of two codes may take either: one step of 3 or 7 bits.
    step = {"fp8": 2**-3, "bf16": 2**-7}[kv_dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=step, atol=0.02)
    index = ours.index_cache.format
    got = torch_host.unpack_index(index, cache_rows(ours.index_cache)[slots])
    expected = torch_host.unpack_index(index, reference.index_rows[slots])
    torch.testing.assert_close(got, expected, rtol=step, atol=0.02)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_only_the_step_s_own_slots_are_written(kv_dtype):
    ours, _, batch = write_tokens(kv_dtype)
    for cache in (ours.latent_cache, ours.index_cache):
        rows = cache_rows(cache)
        is_written = (rows != 0xFF).any(1)
        assert is_written.sum() == batch.num_tokens
        assert is_written[batch.slots].all()
