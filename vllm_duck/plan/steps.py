"""How long layers and steps take: bytes over bandwidth, and what waits for what."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

from vllm_duck.plan.machines import (
    CALL_S,
    DUCK_CALL_S,
    ROUND_TRIP_S,
    STEP_S,
    Fleet,
    Host,
)
from vllm_duck.plan.sizes import FP8_INDEX_BYTES, FP8_LATENT_BYTES, Sizes

CHUNK_ROWS = 2048
MAX_DRAFTS = 7
# A row on the wire, besides H bf16 values: expert ids, weights, frames.
_ROW_REST_BYTES = 64


@dataclass(frozen=True)
class Stages:
    """Seconds of one lane's way through a MoE layer, by who is busy."""

    host_s: float
    # The host's thread with calls; on a GPU host the card is free meanwhile.
    calls_s: float
    there_s: float
    ducks_s: float
    back_s: float
    round_trip_s: float

    @property
    def chain_s(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Given:
    """Stage times of a row that were measured, in place of those by bytes."""

    host_s: float | None = None
    # With the way there and back.
    ducks_s: float | None = None


@dataclass(frozen=True)
class Step:
    """A decode step. tokens: of one request, on the average."""

    num_drafts: int
    tokens: float
    moe_s: float
    dense_s: float
    head_s: float
    mtp_s: float
    rest_s: float

    @property
    def seconds(self) -> float:
        return self.moe_s + self.dense_s + self.head_s + self.mtp_s + self.rest_s

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Planner:
    """A model on a fleet. acceptance: of a draft behind accepted ones."""

    sizes: Sizes
    host: Host
    fleet: Fleet
    # Of an expert's parameter at the ducks, and of the host's.
    expert_bytes: float
    host_bytes: float
    acceptance: float
    context: int = 4096
    given: Given = Given()

    @property
    def row_bytes(self) -> int:
        """Of one row on its way to a duck; about as many come back."""
        return 2 * self.sizes.dims.hidden_size + _ROW_REST_BYTES

    @property
    def most_drafts(self) -> int:
        return MAX_DRAFTS if self.sizes.num_mtp else 0

    def stages(self, num_rows: int, context: int | None = None) -> Stages:
        """Of a lane with these rows in a MoE layer."""
        context = self.context if context is None else context
        to_read = self.sizes.moe_host_bytes(self.host_bytes)
        host_s = self._host_s(num_rows, to_read, context)
        calls_s = CALL_S * self.fleet.num_ducks
        wire_s = num_rows * self.row_bytes / self.fleet.wire_rate
        ducks_s = self._ducks_s(num_rows)
        round_trip_s = ROUND_TRIP_S
        if self.given.host_s is not None:
            host_s, calls_s = self.given.host_s, 0.0
        if self.given.ducks_s is not None:
            ducks_s = self.given.ducks_s * self._experts(num_rows) / self._experts(1)
            wire_s = round_trip_s = 0.0
        return Stages(host_s, calls_s, wire_s, ducks_s, wire_s, round_trip_s)

    def busy(self, stages: Stages) -> dict[str, float]:
        """Seconds of each that can do one lane at a time."""
        thread = {"the host": stages.host_s + stages.calls_s}
        if self.host.is_gpu:
            thread = {"the GPU": stages.host_s, "the host's thread": stages.calls_s}
        port = self.fleet.host_gbps and (
            self.fleet.host_gbps < self.fleet.link_gbps * self.fleet.num_ducks
        )
        wire = "the host's port" if port else "the links"
        return {**thread, wire: stages.there_s, "the ducks": stages.ducks_s}

    def lanes_s(self, first: Stages, second: Stages) -> float:
        """Of two lanes through a layer, in the steady state."""
        both = zip(self.busy(first).values(), self.busy(second).values(), strict=True)
        return max(*(a + b for a, b in both), first.chain_s, second.chain_s)

    def layer_s(self, num_rows: int, context: int | None = None) -> float:
        """Of a MoE layer, in lanes or whole, whichever is quicker."""
        whole_s = self.stages(num_rows, context).chain_s
        if num_rows < 2:
            return whole_s
        half = num_rows // 2
        lanes = (self.stages(rows, context) for rows in (num_rows - half, half))
        return min(whole_s, self.lanes_s(*lanes))

    def bottleneck(self, num_rows: int) -> str:
        """Whoever is busy longest, or the way round where nobody is all the time."""
        half = self.stages(max(1, num_rows - num_rows // 2))
        name, longest = max(self.busy(half).items(), key=lambda item: item[1])
        is_serial = num_rows < 2 or half.chain_s > 2 * longest
        return f"{name}; one waits for the other" if is_serial else name

    def step(self, num_drafts: int) -> Step:
        """One request that decodes with so many drafts."""
        rows = 1 + num_drafts
        drafts = range(1, rows)
        dense = self.sizes.dense_bytes(self.host_bytes)
        return Step(
            num_drafts,
            1 + sum(self.acceptance**depth for depth in drafts),
            self.sizes.num_moe * self.layer_s(rows),
            self.sizes.num_dense * self._host_s(rows, dense, self.context),
            self._head_s,
            num_drafts * (self._mtp_layer_s + self._head_s),
            STEP_S,
        )

    def best_step(self) -> Step:
        steps = [self.step(count) for count in range(self.most_drafts + 1)]
        return max(steps, key=lambda step: step.tok_s)

    def prefill_s(self, num_tokens: int) -> float:
        """To the first token of a prompt."""
        chunks = list(self._chunks(num_tokens))
        return sum(chunks) + self._head_s

    def prefill_tok_s(self) -> float:
        """Of a full chunk behind `context` tokens."""
        return CHUNK_ROWS / self._chunk_s(CHUNK_ROWS, self.context)

    def _chunks(self, num_tokens: int) -> Iterator[float]:
        for start in range(0, num_tokens, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, num_tokens - start)
            yield self._chunk_s(rows, start + rows // 2)

    def _chunk_s(self, num_rows: int, context: int) -> float:
        dense = self.sizes.dense_bytes(self.host_bytes)
        return (
            self.sizes.num_moe * self.layer_s(num_rows, context)
            + self.sizes.num_dense * self._host_s(num_rows, dense, context)
            + STEP_S
        )

    def _host_s(self, num_rows: int, num_bytes: float, context: int) -> float:
        """Of a layer whose weights take so many bytes."""
        d = self.sizes.dims
        attended = min(context, d.index_topk)
        indexed = context * self.sizes.index_share
        to_read = num_bytes + indexed * FP8_INDEX_BYTES + attended * FP8_LATENT_BYTES
        # Scores of the indexer; scores and sums over the latent.
        width = 2 * d.kv_lora_rank + d.qk_rope_head_dim
        row_flops = 2 * (num_bytes / self.host_bytes)
        row_flops += 2 * d.index_n_heads * d.index_head_dim * indexed
        row_flops += 2 * d.num_attention_heads * width * attended
        work_s = num_rows * row_flops / self.host.flop_rate
        return max(to_read / self.host.read_rate, work_s) + self.host.layer_s

    def _ducks_s(self, num_rows: int) -> float:
        d = self.sizes.dims
        share = self.sizes.expert / self.fleet.num_ducks
        to_read = self._experts(num_rows) * share * self.expert_bytes
        flops = num_rows * d.num_experts_per_tok * 2 * share
        work_s = flops / self.fleet.duck_flop_rate
        return max(to_read / self.fleet.duck_read_rate, work_s) + DUCK_CALL_S

    def _experts(self, num_rows: int) -> float:
        """Distinct experts of rows that choose independently of each other."""
        d = self.sizes.dims
        missed = (1 - d.num_experts_per_tok / d.n_routed_experts) ** num_rows
        return d.n_routed_experts * (1 - missed)

    @cached_property
    def _head_s(self) -> float:
        return self.sizes.vocabulary_bytes / self.host.read_rate

    @cached_property
    def _mtp_layer_s(self) -> float:
        projection = self.sizes.mtp_projection * self.host_bytes
        return self.stages(1).chain_s + projection / self.host.read_rate
