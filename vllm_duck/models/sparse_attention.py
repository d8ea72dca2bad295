"""Sparse multi-head latent attention over paged caches, in plain torch.

For each row the lightning indexer scores every visible position and keeps the best
`index_topk`; attention runs over those alone, in the latent space (the key and value
up-projections are folded into query and output).
Source: DeepSeek-V3.2 technical report, section 2.1; inference/model.py::Indexer, MLA.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_duck.models.batch import AttentionBatch, RowGroup
from vllm_duck.models.kv_cache import IndexCache, LatentCache

# A prompt chunk whose context is at most this many times top-k computes all logits
# and masks: GEMMs over a shared context cost less than gathering keys row by row.
MAX_MASKED_CONTEXT = 16
# Rows of a prompt chunk whose selected keys are gathered at once.
GATHERED_ROWS = 32


@dataclass(frozen=True)
class AttentionInputs:
    """What the layer computed from its hidden states.

    Shapes: T tokens, A attention heads, L latent, R rope, J indexer heads, D index.
        query        [T, A, L + R]  bf16   latent-space query, rotated rope part
        index_query  [T, J, D]      fp32   rotated
        index_weight [T, J]         fp32   per-head weights, all scales included
    """

    query: Tensor
    index_query: Tensor
    index_weight: Tensor


def attend(
    inputs: AttentionInputs,
    batch: AttentionBatch,
    *,
    latent_cache: LatentCache,
    index_cache: IndexCache,
    index_topk: int,
    scale: float,
) -> Tensor:
    """Attend every token of the step; the step's own keys are already cached.

    Returns [T, A, L] bf16: the attention output in the latent space.
    """
    latent_dim = latent_cache.format.latent_dim
    num_tokens, num_heads, _ = inputs.query.shape
    output = inputs.query.new_zeros(num_tokens, num_heads, latent_dim)
    for group in batch.groups:
        query = inputs.query[group.rows]
        num_positions = group.slots.shape[1]
        selected = None
        if num_positions > index_topk:
            scores = index_scores(
                inputs.index_query[group.rows],
                inputs.index_weight[group.rows],
                index_cache.format.unpack(index_cache.rows[group.slots]),
            )
            selected = _select(scores, group.visible, index_topk)
        output[group.rows] = _attend_group(query, group, selected, latent_cache, scale)
    return output


def index_scores(query: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """Score each context position for each row.

    Shapes: query [R, J, D], weight [R, J], keys [C, S, D] with C = R or 1, fp32.
    Returns [R, S] fp32: sum over heads of weight * relu(query . key).
    """
    num_rows, num_heads, _ = query.shape
    if keys.shape[0] == 1:
        dots = (query.flatten(0, 1) @ keys[0].t()).view(num_rows, num_heads, -1)
    else:
        dots = query @ keys.transpose(1, 2)
    return torch.bmm(weight.unsqueeze(1), dots.relu_()).squeeze(1)


def _select(scores: Tensor, visible: Tensor, index_topk: int) -> Tensor:
    """The best positions of each row, [R, index_topk] int64.

    A row that sees fewer than index_topk positions gets all of them, then some that
    it does not see: the caller masks by `visible`.
    """
    positions = torch.arange(scores.shape[1], device=scores.device)
    scores.masked_fill_(positions >= visible[:, None], float("-inf"))
    return scores.topk(index_topk, dim=-1, sorted=False).indices


def _attend_group(
    query: Tensor,
    group: RowGroup,
    selected: Tensor | None,
    cache: LatentCache,
    scale: float,
) -> Tensor:
    latent_dim = cache.format.latent_dim
    num_positions = group.slots.shape[1]
    if not group.is_shared:
        if selected is None:
            selected, slots = _all_positions(group.slots), group.slots
        else:
            slots = group.slots.gather(1, selected)
        keys = cache.format.unpack(cache.rows[slots])
        hidden = selected >= group.visible[:, None]
        return _attend_gathered(query, keys, hidden, latent_dim, scale)
    keys = cache.format.unpack(cache.rows[group.slots[0]])
    hidden = _all_positions(group.slots) >= group.visible[:, None]
    if selected is None:
        return _attend_shared(query, keys, hidden, latent_dim, scale)
    if num_positions <= MAX_MASKED_CONTEXT * selected.shape[1]:
        hidden |= torch.ones_like(hidden).scatter_(1, selected, False)
        return _attend_shared(query, keys, hidden, latent_dim, scale)
    parts = []
    for lo in range(0, query.shape[0], GATHERED_ROWS):
        rows = slice(lo, lo + GATHERED_ROWS)
        part_hidden = hidden[rows].gather(1, selected[rows])
        part_keys = keys[selected[rows]]
        parts.append(
            _attend_gathered(query[rows], part_keys, part_hidden, latent_dim, scale)
        )
    return torch.cat(parts)


def _all_positions(slots: Tensor) -> Tensor:
    """[1, S]: every position of the group's contexts."""
    return torch.arange(slots.shape[1], device=slots.device)[None]


def _attend_shared(
    query: Tensor, keys: Tensor, hidden: Tensor, latent_dim: int, scale: float
) -> Tensor:
    """All rows against one context: query [R, A, W], keys [S, W], hidden [R, S]."""
    num_rows, num_heads, _ = query.shape
    logits = (query.flatten(0, 1) @ keys.t()).view(num_rows, num_heads, -1)
    weights = _softmax(logits, hidden, scale).flatten(0, 1)
    return (weights @ keys[:, :latent_dim]).view(num_rows, num_heads, latent_dim)


def _attend_gathered(
    query: Tensor, keys: Tensor, hidden: Tensor, latent_dim: int, scale: float
) -> Tensor:
    """Each row against its own keys: query [R, A, W], keys [R, K, W], hidden [R, K]."""
    logits = query @ keys.transpose(1, 2)
    return _softmax(logits, hidden, scale) @ keys[..., :latent_dim]


def _softmax(logits: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """logits [R, A, K] bf16, hidden [R or 1, K] bool -> weights [R, A, K] bf16."""
    scaled = logits.float().mul_(scale)
    scaled.masked_fill_(hidden[:, None], float("-inf"))
    return scaled.softmax(-1).to(logits.dtype)
