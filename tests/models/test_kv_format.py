"""The byte layouts of the two caches."""

import pytest
import torch

from vllm_duck.models.kv_format import IndexFormat, LatentFormat


def test_official_sizes_take_the_official_bytes():
    assert LatentFormat(512, 64, "fp8").token_bytes == 656
    assert IndexFormat(128, "fp8").token_bytes == 132
    assert LatentFormat(512, 64, "bf16").token_bytes == 1152
    assert IndexFormat(128, "bf16").token_bytes == 256


def test_fp8_latent_rounds_within_e4m3_and_keeps_rope_in_bf16():
    torch.manual_seed(0)
    token_format = LatentFormat(512, 64, "fp8")
    latent = torch.randn(40, 512) * torch.logspace(-6, 4, 40)[:, None]
    rope = torch.randn(40, 64)
    rows = token_format.pack(latent, rope)
    assert rows.shape == (40, 656)
    keys = token_format.unpack(rows)
    tile_peak = latent.unflatten(1, (4, 128)).abs().amax(-1, keepdim=True)
    error = (keys[:, :512].float() - latent).unflatten(1, (4, 128)).abs()
    # Half a unit of 3 mantissa bits, plus half a subnormal step (2**-10 of scale),
    # plus the rounding of the product to bf16.
    bound = latent.unflatten(1, (4, 128)).abs() * (2**-4 + 2**-8)
    bound = bound + tile_peak / 448 * 2**-10
    assert (error <= bound).all()
    assert torch.equal(keys[:, 512:], rope.bfloat16())


def test_layout_is_values_then_scales_then_rope():
    token_format = LatentFormat(512, 64, "fp8")
    latent = torch.zeros(1, 512)
    latent[0, 128:256] = 448.0
    latent[0, 300] = -2.0
    rope = torch.arange(64.0)[None]
    row = token_format.pack(latent, rope)[0]
    scales = row[512:528].view(torch.float32)
    assert scales.tolist() == pytest.approx([1.0, 1.0, 2 / 448, 1.0])
    assert row[128:256].view(torch.float8_e4m3fn).float().eq(448).all()
    assert row[300:301].view(torch.float8_e4m3fn).float().item() == -448
    assert torch.equal(row[528:].view(torch.bfloat16), rope[0].bfloat16())


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_index_keys_come_back(dtype):
    torch.manual_seed(0)
    keys = torch.randn(9, 128)
    token_format = IndexFormat(128, dtype)
    got = token_format.unpack(token_format.pack(keys))
    # Half a unit of 3 and of 7 mantissa bits.
    bound = {"fp8": 2**-4, "bf16": 2**-8}[dtype]
    assert ((got - keys).abs() <= bound * keys.abs() + 1e-2 * bound).all()


def test_zeros_stay_zeros():
    token_format = IndexFormat(128, "fp8")
    assert token_format.unpack(token_format.pack(torch.zeros(2, 128))).eq(0).all()
