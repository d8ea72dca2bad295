"""The shipped models/tiny-v32 is a complete official-format V3.2 checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training.config import TinyConfig
from training.export import INDEX_NAME, official_tensors, quantize
from training.model import TinyModel
from training.tokenizer import EOS, SPECIAL_TOKENS, prompt

MAX_BYTES = 20_000_000
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}


def _stored(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    index = json.loads((folder / INDEX_NAME).read_text())
    found = {}
    for file_name in set(index["weight_map"].values()):
        with safe_open(folder / file_name, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                piece = shard.get_slice(name)
                shape = torch.Size(piece.get_shape())
                found[name] = (shape, DTYPES[piece.get_dtype()])
                assert index["weight_map"][name] == file_name
    return found


def test_everything_together_stays_below_20_mb(bundled: Path) -> None:
    assert sum(path.stat().st_size for path in bundled.iterdir()) <= MAX_BYTES


def test_every_official_tensor_is_there_with_its_shape_and_dtype(bundled: Path) -> None:
    expected = quantize(official_tensors(TinyModel(TinyConfig())))
    wanted = {name: (value.shape, value.dtype) for name, value in expected.items()}
    assert _stored(bundled) == wanted


def test_index_counts_every_byte(bundled: Path) -> None:
    index = json.loads((bundled / INDEX_NAME).read_text())
    sizes = [shape.numel() * d.itemsize for shape, d in _stored(bundled).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len(set(index["weight_map"].values())) == 2


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
        "self_attn.indexer.wk.weight_scale_inv",
        "self_attn.kv_b_proj.weight_scale_inv",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.15.down_proj.weight_scale_inv",
        "mlp.shared_experts.up_proj.weight",
    ],
)
def test_mtp_layer_has_its_official_names(bundled: Path, name: str) -> None:
    assert f"model.layers.4.{name}" in _stored(bundled)


def test_config_is_the_bundled_shape_in_official_spelling(bundled: Path) -> None:
    spelled = json.loads((bundled / "config.json").read_text())
    assert spelled == TinyConfig().official()
    assert TinyConfig.from_official(spelled) == TinyConfig()


@pytest.mark.parametrize("thinking", [False, True])
def test_chat_template_writes_what_training_saw(bundled: Path, thinking: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    asked = [{"role": "user", "content": "Is 97 prime?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, thinking=thinking)
    assert text == prompt("Is 97 prime?", thinking=thinking)


def test_plain_completions_start_with_bos_and_chats_do_not_double_it(
    bundled: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    assert tokenizer("hello").input_ids[0] == tokenizer.bos_token_id
    asked = [{"role": "user", "content": "hello"}]
    token_ids = tokenizer.apply_chat_template(asked, return_dict=False)
    assert token_ids.count(tokenizer.bos_token_id) == 1


def test_special_tokens_have_the_ids_the_config_names(bundled: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bundled / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.token_to_id(EOS) == 1
