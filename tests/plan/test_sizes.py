"""Parameter counts against tensors and published figures; what fits on a card."""

import json

import pytest
from safetensors import safe_open

from tests.plan.conftest import V32
from vllm_duck.errors import DuckConfigError
from vllm_duck.plan.card import card_memory, check_card
from vllm_duck.plan.sizes import BF16_BYTES, FP8_BYTES, read_sizes


def test_the_bundled_checkpoint_has_as_many_parameters_as_counted(tiny_model):
    sizes = read_sizes(tiny_model)
    counted = {"experts": 0, "rest": 0}
    for path in tiny_model.glob("*.safetensors"):
        with safe_open(path, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(name).get_shape()
                if len(shape) == 2 and not name.endswith("_scale_inv"):
                    part = "experts" if ".experts." in name else "rest"
                    counted[part] += shape[0] * shape[1]
    assert sizes.experts_bytes(1.0) == counted["experts"]
    layers, moe = sizes.num_layers, sizes.num_moe + sizes.num_mtp
    assert counted["rest"] == (
        layers * (sizes.attention + sizes.indexer + sizes.index_weights)
        + moe * (sizes.shared + sizes.router)
        + sizes.num_dense * sizes.dense
        + sizes.num_mtp * sizes.mtp_projection
        + sizes.vocabulary * _num_vocabularies(tiny_model)
    )


def _num_vocabularies(model_dir):
    """Embedding and head, and the MTP layer's copies of them."""
    shape, count = [2048, 256], 0
    for path in model_dir.glob("*.safetensors"):
        with safe_open(path, "np") as tensors:
            found = [tensors.get_slice(n).get_shape() for n in tensors.keys()]  # noqa: SIM118
            count += found.count(shape)
    return count


def test_deepseek_v32_has_the_published_sizes(sizes):
    experts = sizes.experts_bytes(1.0)
    rest = sizes.host_bytes(1.0) + 2 * sizes.vocabulary
    # 671 B, and 14 B of the MTP layer's module with its copies of embedding and head.
    assert experts + rest == pytest.approx(685e9 - 2 * sizes.vocabulary, rel=0.01)
    assert sizes.kv_bytes == 62 * (656 + 132)
    assert sizes.moe_host_bytes(FP8_BYTES) == pytest.approx(252.9e6, rel=1e-3)
    assert sizes.moe_host_bytes(BF16_BYTES) == pytest.approx(497.5e6, rel=1e-3)


@pytest.mark.parametrize(
    ("gib", "tokens"), [(24, 88_058), (32, 255_088), (48, 589_149), (80, 1_257_271)]
)
def test_a_card_holds_weights_and_tokens(sizes, gib, tokens):
    memory = card_memory(sizes, gib)
    assert memory.weight_bytes == pytest.approx(18.68e9, rel=1e-3)
    assert memory.num_tokens == tokens
    check_card(memory, "card")
    used = memory.weight_bytes + memory.workspace_bytes + tokens * sizes.kv_bytes
    assert used <= memory.usable_bytes < used + sizes.kv_bytes


def test_a_card_that_is_too_small_is_refused_with_the_numbers(sizes):
    message = r"small has 15\.7 GB .* 4,096 tokens need 19\.8: give a larger --host"
    with pytest.raises(DuckConfigError, match=message):
        check_card(card_memory(sizes, 16), "small")


def test_without_fp8_weights_take_two_bytes(tmp_path):
    config = {k: v for k, v in V32.items() if k != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_sizes(tmp_path).weight_bytes == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*config.json"),
        ("{", "cannot read .*config.json"),
        ("[]", "no config.json of a model"),
        ('{"architectures": ["LlamaForCausalLM"]}', "Llama"),
    ],
)
def test_what_is_no_model_of_ours_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DuckConfigError, match=message):
        read_sizes(tmp_path)
