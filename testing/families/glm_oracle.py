"""transformers' GLM-5 with the MTP layer that it leaves out, in fp32."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from testing.oracle import load_transformers, write_dequantized


def write_exact(model_dir: Path, out_dir: Path) -> Path:
    """The checkpoint in fp32, its MTP layer as one more layer of the trunk."""
    write_dequantized(model_dir, out_dir, torch.float32, with_mtp=True)
    path = out_dir / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] += 1
    config["indexer_types"].append("full")
    config["mlp_layer_types"].append("sparse")
    path.write_text(json.dumps(config))
    return out_dir


class GlmOracle:
    """What `write_exact` wrote: the trunk as transformers runs it, and drafts."""

    def __init__(self, exact_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        self.trunk = load_transformers(exact_dir, dtype)
        # It runs so many of its layers.
        self.trunk.config.num_hidden_layers -= 1
        self._prefix = f"model.layers.{self.trunk.config.num_hidden_layers}"
        self._weights = load_file(exact_dir / "model.safetensors")

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, V]"""
        with torch.inference_mode():
            return self.trunk(torch.tensor([token_ids])).logits[0]

    @torch.inference_mode()
    def draft_logits(
        self, prompt: list[int], token_ids: list[int], *, shares_choice: bool
    ) -> Tensor:
        """Of the drafts behind a prompt and the token it gave, [K, V].

        token_ids: the prompt's answer and the drafts themselves. The layer runs over
        the whole sequence each time. shares_choice: the rows of drafts attend to what
        the prompt's last row chose, or else each chooses for itself.
        """
        hidden = self.trunk.model(torch.tensor([prompt])).last_hidden_state
        next_ids, choice, found = prompt[1:], None, []
        for token_id in token_ids:
            next_ids = [*next_ids, token_id]
            output, chosen = self._layer(next_ids, hidden, choice)
            found.append(self.trunk.lm_head(output[0, -1]))
            hidden = torch.cat([hidden, output[:, -1:]], 1)
            if shares_choice:
                choice = torch.cat([chosen, chosen[:, len(prompt) - 1 :][:, :1]], 1)
        return torch.stack(found)

    def _layer(
        self, next_ids: list[int], hidden: Tensor, choice: Tensor | None
    ) -> tuple[Tensor, Any]:
        model = self.trunk.model
        layer = model.layers[self.trunk.config.num_hidden_layers]
        embeds = model.embed_tokens(torch.tensor([next_ids]))
        embeds[:, 0] = 0
        joined = [self._norm("enorm", embeds), self._norm("hnorm", hidden)]
        x = F.linear(torch.cat(joined, -1), self._weight("eh_proj"))
        num_rows = len(next_ids)
        mask = torch.full((num_rows, num_rows), float("-inf")).triu(1)[None, None]
        indexer = layer.self_attn.indexer
        if choice is not None:
            layer.self_attn.indexer = None
        output, chosen = layer(
            x,
            attention_mask=mask,
            position_embeddings=model.rotary_emb(x, torch.arange(num_rows)[None]),
            prev_topk_indices=choice,
        )
        layer.self_attn.indexer = indexer
        return self._norm("shared_head.norm", output), chosen

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weight(name)
        return F.rms_norm(x, weight.shape, weight, self.trunk.config.rms_norm_eps)

    def _weight(self, name: str) -> Tensor:
        return self._weights[f"{self._prefix}.{name}.weight"]
