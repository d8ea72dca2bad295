"""The MTP layer is built as the target is, whatever vLLM makes of a draft's config."""

import pytest
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from vllm_duck import hooks
from vllm_duck.models import mtp
from vllm_duck.models.cpu.backend import CpuBackend
from vllm_duck.models.dimensions import Dimensions

hooks.install_hooks()

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("duck", [{}, {"mtp_shadow": True}], ids=str)
def test_overrides_of_the_target_reach_the_mtp_layer(tiny_model, monkeypatch, duck):
    overrides = {"max_position_embeddings": 16384, "rope_parameters": ROPE}
    args = EngineArgs(
        model=str(tiny_model),
        max_model_len=8192,
        hf_overrides={**overrides, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-5},
        speculative_config=None if duck else {"method": "duck_mtp1"},
        additional_config={"duck": duck},
    )
    config = args.create_engine_config()
    # These two ask for vLLM's process groups.
    for part in ("embedding", "head"):
        monkeypatch.setattr(CpuBackend, part, lambda self, *size: nn.Embedding(*size))
    with set_current_vllm_config(config):
        layer = mtp.MtpDraftModel(vllm_config=config)
    target = Dimensions.from_hf_config(config.model_config.hf_config)
    assert layer.dims == target
    assert target.rope.factor == 16
    assert target.routed_scaling_factor == 1.5
    assert target.rms_norm_eps == 1e-5
