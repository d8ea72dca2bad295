"""GLM-5.2's sizes: what is counted in a checkpoint, and what is published."""

import json

import pytest
from safetensors import safe_open

from testing.families.glm import GLM_5_2
from vllm_duck.plan.sizes import FP8_BYTES, read_sizes


@pytest.fixture
def sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2))
    return read_sizes(tmp_path)


def test_a_checkpoint_has_as_many_parameters_as_counted(glm_model):
    """Shared layers have no indexer, and the MTP layer neither embedding nor head."""
    sizes = read_sizes(glm_model)
    num_counted = 0
    with safe_open(glm_model / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            shape = tensors.get_slice(name).get_shape()
            if len(shape) == 2 and not name.endswith("_scale_inv"):
                num_counted += shape[0] * shape[1]
    assert sizes.num_indexers == 5
    assert num_counted == sizes.experts_bytes(1.0) + (
        sizes.num_layers * sizes.attention
        + sizes.num_indexers * (sizes.indexer + sizes.index_weights)
        + (sizes.num_moe + sizes.num_mtp) * (sizes.shared + sizes.router)
        + sizes.num_dense * sizes.dense
        + sizes.num_mtp * sizes.mtp_projection
        + 2 * sizes.vocabulary
    )


def test_glm_5_2_has_the_published_sizes(sizes):
    """753 billion parameters with the MTP layer, 40 of them active."""
    assert sizes.num_indexers == 22
    experts = sizes.experts_bytes(1.0)
    total = experts + sizes.host_bytes(1.0) + 2 * sizes.vocabulary
    assert total == pytest.approx(753e9, rel=0.01)
    assert sizes.experts_bytes(FP8_BYTES) == pytest.approx((725 + 9.67) * 1e9, rel=1e-3)


def test_a_token_takes_79_latent_and_22_index_rows(sizes):
    assert sizes.kv_bytes == 79 * 656 + 22 * 132
