"""transformers' own DeepSeek-V3.2 computes what our training model computes."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import DeepseekV32ForCausalLM, PreTrainedModel

from training.attention import AttentionPlan
from training.corpus import Corpus
from training.export import read_model, write_dequantized
from training.layers import yarn_frequencies
from training.model import TinyModel

# transformers' report of the MTP tensors it has no layer for.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def oracle(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    copy = tmp_path_factory.mktemp("bf16")
    write_dequantized(bundled, copy)
    # By its class: where vLLM is imported, transformers' Auto classes read this
    # architecture as the dense DeepSeek-V3.
    return DeepseekV32ForCausalLM.from_pretrained(
        copy, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def model(bundled: Path) -> TinyModel:
    return read_model(bundled, torch.float32)


@pytest.fixture(scope="module")
def text(bundled: Path) -> list[int]:
    """Held-out documentation, as tokens."""
    tokenizer = Tokenizer.from_file(str(bundled / "tokenizer.json"))
    topics = "\n\n".join(c for t in Corpus().held_out_topics for c in t.chunks)
    return tokenizer.encode(topics, add_special_tokens=False).ids


# index_topk is 64: shorter prompts are dense, longer ones select. On noise many index
# scores are exactly zero, and which of them is kept is chance; so real text.
@pytest.mark.parametrize("length", [1, 20, 64, 65, 200, 600])
@torch.no_grad()
def test_trunk_logits_match(
    oracle: PreTrainedModel, model: TinyModel, text: list[int], length: int
) -> None:
    token_ids = torch.tensor([text[:length]])
    theirs = oracle(token_ids).logits
    ours = model.lm_head(model.trunk(token_ids, AttentionPlan()))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_rotary_frequencies_match(oracle: PreTrainedModel, model: TinyModel) -> None:
    theirs = oracle.model.rotary_emb.inv_freq
    torch.testing.assert_close(yarn_frequencies(model.config), theirs)
