"""vLLM's model runner with duck's lanes, verification and drafting.

The life of a step; the class has its methods in this order:
1. `execute_model`: vLLM prepares the batch and runs the model, whose layers with ducks
   go through `Lanes` (lanes/run.py).
2. `sample_tokens` does the rest. `_sample` verifies the drafts that the step's rows
   carry (acceptance.py).
3. vLLM's bookkeeping appends the tokens taken.
4. `propose_draft_token_ids` runs the MTP layer over the confirmed rows (confirmed.py)
   and drafts on (proposer.py), as far as it pays (gate.py); drafts.py keeps what drafts
   without a seed were drawn from.
5. `take_draft_token_ids` hands the drafts to the scheduler.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_duck.config import DuckConfig
from vllm_duck.executor.duck import Ducks
from vllm_duck.models.platforms import host_backend
from vllm_duck.spec_decode.acceptance import DuckRejectionSampler, VerifyBatch
from vllm_duck.spec_decode.confirmed import ConfirmedRows, confirmed_rows
from vllm_duck.spec_decode.draft_meter import DraftMeter
from vllm_duck.spec_decode.drafts import NO_TOKEN, Draft, PendingDrafts
from vllm_duck.spec_decode.gate import DraftGate
from vllm_duck.spec_decode.lanes.policy import LanePolicy
from vllm_duck.spec_decode.lanes.run import Lanes
from vllm_duck.spec_decode.plain_sampler import PlainSampler
from vllm_duck.spec_decode.proposer import Drafted, DuckProposer
from vllm_duck.spec_decode.shadow import Shadow


@dataclass(frozen=True)
class StepClock:
    """What the scheduler asked of the current step, and when."""

    num_rows: int = 0
    # Whether no request is in its prompt, and every row has a token: what a step with
    # vLLM's padding takes says nothing about drafts.
    is_decoding: bool = False
    begin_s: float = 0.0

    @classmethod
    def start(cls, scheduler_output: Any) -> "StepClock":
        num_reqs = len(scheduler_output.num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_drafts = sum(map(len, drafts.values()))
        num_rows = scheduler_output.total_num_scheduled_tokens
        is_padded = any(NO_TOKEN in tokens for tokens in drafts.values())
        return cls(
            num_rows,
            num_rows == num_reqs + num_drafts and not is_padded,
            time.perf_counter(),
        )

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.begin_s


class DuckModelRunner(GPUModelRunner):
    """vLLM's own with lanes, and right seeds in a chunked prefill; drafts on top.

    GPUModelRunner is the base of all of vLLM's V1 runners; a platform whose runner is
    another, as the CPU's, puts that one behind this class (`models/platforms.py`).
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = DuckConfig.of(vllm_config)
        self.lanes = Lanes(host_backend(), LanePolicy(config.overlap))
        self.drafts = PendingDrafts()
        self.shadow: Shadow | None = None
        self.gate: DraftGate | None = None
        self.draft_meter: DraftMeter | None = None
        self._step = StepClock()
        if self.speculative_config is None:
            return
        self.duck_sampler = PlainSampler(self.sampler)
        self.verifier = DuckRejectionSampler(self.duck_sampler)
        self.drafter: DuckProposer = DuckProposer(
            vllm_config, device, self, sampler=self.duck_sampler
        )
        if config.mtp_shadow:
            self.shadow = Shadow()
        else:
            self.draft_meter = DraftMeter(self.num_spec_tokens)
            if config.draft_gate:
                self.gate = DraftGate(self.num_spec_tokens)
        self._take_budgets_token_by_token()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model.run_remote_layers_with(self.lanes)

    def figures(self) -> dict[str, Any]:
        """Sums over all steps, as plain values; those of drafts where there are any."""
        figures = self.lanes.figures()
        if self.draft_meter is not None:
            figures["drafts"] = self.draft_meter.total.figures()
        return figures

    def attach_ducks(self, ducks: Ducks) -> None:
        self.model.attach_ducks(ducks)
        if self.speculative_config is not None:
            self.drafter.model.attach_ducks(ducks)

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        self._take_budgets_token_by_token()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = StepClock.start(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with self._generators_of_samplers_only():
            return super().sample_tokens(grammar_output)

    def _sample(
        self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        if spec_decode_metadata is None:
            return super()._sample(logits, spec_decode_metadata)
        assert logits is not None
        batch = self._verify_batch(spec_decode_metadata)
        verified = self.verifier(batch, logits, self.input_batch.sampling_metadata)
        self._observe_verified(batch, verified.output)
        if self.shadow is not None:
            assert verified.output.sampled_token_ids.shape[1] == 1
            for i, req_id in self._sampling_reqs():
                self.shadow.compare(req_id, verified.first_row, i)
        return verified.output

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: None,
        spec_decode_metadata: SpecDecodeMetadata,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Tensor:
        """Draft tokens [B, K]. vLLM's own body pads, copies and branches far more."""
        step_s = self._step.elapsed_s()
        if self.gate is not None and self._step.is_decoding:
            self.gate.observe_step(self._step.num_rows, step_s)
        next_ids = self.drafter.prepare_next_token_ids_cpu(
            sampled_token_ids,
            self.requests,
            self.input_batch,
            scheduler_output.num_scheduled_tokens,
        )
        num_rejected = [
            num_drafts + 1 - len(taken) if num_drafts else 0
            for num_drafts, taken in zip(
                spec_decode_metadata.num_draft_tokens, sampled_token_ids, strict=True
            )
        ]
        rows = self._confirmed_rows(
            hidden_states, common_attn_metadata, num_rejected, next_ids
        )
        if self.shadow is not None:
            return self._draft_in_shadow(self.shadow, rows, sampling_metadata)
        drafted = self._draft(rows, sampling_metadata)
        if self._step.is_decoding:
            self._observe_drafting(step_s, drafted)
        self._keep_drafts(drafted)
        return drafted.token_ids

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if self.shadow:
            return None
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        token_ids = [
            [token for token in tokens if token != NO_TOKEN]
            for tokens in drafts.draft_token_ids
        ]
        return DraftTokenIds(drafts.req_ids, token_ids)

    def drop_drafts(self) -> None:
        """The step has failed: what an earlier one drafted is not to be taken again."""
        self._draft_token_ids = None
        self._draft_token_req_ids = None

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: the layer runs over confirmed rows, whose slots exist.

        vLLM skips the whole batch when one request is near its maximum length, which
        would leave holes in every other request's MTP cache.
        """
        return common_attn_metadata is not None

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.drafts.take(req_id)
        if self.shadow is not None:
            self.shadow.finish(req_id)
        if self.gate is not None:
            self.gate.forget(req_id)

    def _verify_batch(self, metadata: SpecDecodeMetadata) -> VerifyBatch:
        drafted = iter(metadata.draft_token_ids.tolist())
        batch = self.input_batch
        pending: list[Draft | None] = [None] * batch.num_reqs
        for i, req_id in self._sampling_reqs():
            pending[i] = self.drafts.take(req_id)
        return VerifyBatch(
            scheduled=tuple(
                tuple(islice(drafted, count)) for count in metadata.num_draft_tokens
            ),
            pending=tuple(pending),
            output_token_ids=batch.req_output_token_ids,
        )

    def _confirmed_rows(
        self, hidden: Tensor, common: Any, num_rejected: list[int], next_ids: Tensor
    ) -> ConfirmedRows:
        num_reqs = self.input_batch.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1].tolist()
        num_rows = starts[-1]
        return confirmed_rows(
            token_ids=self.input_ids.gpu[:num_rows],
            positions=self._get_positions(num_rows),
            hidden=hidden[:num_rows],
            starts=starts,
            seq_lens=common.seq_lens[:num_reqs].tolist(),
            num_rejected=num_rejected,
            next_ids=next_ids,
            slots=common.slot_mapping[:num_rows],
            block_table=common.block_table_tensor[:num_reqs],
            block_size=self.cache_config.block_size,
        )

    def _draft(self, rows: ConfirmedRows, sampling_metadata: Any) -> Drafted:
        batch = self.input_batch
        num_blocks = batch.block_table[0].num_blocks_per_row
        # A request in the middle of its prompt has no use for more than one.
        room = [0] * batch.num_reqs
        num_wanted = [1] * batch.num_reqs
        for (i, _), count in zip(self._sampling_reqs(), self._choose(), strict=True):
            num_slots = int(num_blocks[i]) * self.cache_config.block_size
            room[i] = min(self.max_model_len, num_slots)
            num_wanted[i] = count
        return self.drafter.draft(
            rows,
            sampling_metadata,
            num_wanted=num_wanted,
            room=room,
            output_token_ids=batch.req_output_token_ids,
        )

    def _choose(self) -> list[int]:
        """How many drafts each request that samples is to have."""
        req_ids = [req_id for _, req_id in self._sampling_reqs()]
        if self.gate is None:
            return [self.num_spec_tokens] * len(req_ids)
        return self.gate.choose(req_ids)

    def _draft_in_shadow(
        self, shadow: Shadow, rows: ConfirmedRows, sampling_metadata: Any
    ) -> Tensor:
        """Draft, and leave no trace in the random numbers of what follows."""
        with torch.random.fork_rng(devices=[]):
            drafted = self._draft(rows, sampling_metadata)
        for i, req_id in self._sampling_reqs():
            shadow.remember(req_id, drafted.rows[0], i)
        return drafted.token_ids

    def _observe_verified(self, batch: VerifyBatch, output: SamplerOutput) -> None:
        """Count which drafts were accepted, and tell the gate.

        vLLM pads rows with NO_TOKEN, for example where a prompt of one token joins
        requests that draft; padding is no draft.
        """
        taken = (output.sampled_token_ids >= 0).sum(1).tolist()
        for i, req_id in self._sampling_reqs():
            scheduled = batch.scheduled[i]
            if not scheduled or NO_TOKEN in scheduled:
                continue
            if self.draft_meter is not None:
                self.draft_meter.add_verified(len(scheduled), taken[i] - 1)
            if self.gate is not None:
                self.gate.observe_verified(req_id, len(scheduled), taken[i] - 1)

    def _observe_drafting(self, step_s: float, drafted: Drafted) -> None:
        if self.draft_meter is not None:
            self.draft_meter.add_step(step_s, drafted.passes)
        if self.gate is not None:
            self.gate.observe_drafting(drafted.passes)

    def _keep_drafts(self, drafted: Drafted) -> None:
        """Remember what drafts of requests without a seed were drawn from."""
        batch = self.input_batch
        kept = [
            (i, req_id)
            for i, req_id in self._sampling_reqs()
            if req_id in batch.random_reqs
            and i not in batch.generators
            and drafted.num_drafts[i]
        ]
        if not kept:
            return
        req_indices = [i for i, _ in kept]
        probs = torch.stack([row.probs(req_indices) for row in drafted.rows], 1)
        tokens = drafted.token_ids[req_indices].tolist()
        for row, (i, req_id) in enumerate(kept):
            count = drafted.num_drafts[i]
            draft = Draft(tuple(tokens[row][:count]), probs[row, :count])
            self.drafts.put(req_id, draft)

    def _sampling_reqs(self) -> list[tuple[int, str]]:
        """Requests that take a token in this step, by index; others are in a prompt."""
        is_discarded = self.discard_request_mask.np
        return [
            (i, req_id)
            for i, req_id in enumerate(self.input_batch.req_ids)
            if not is_discarded[i]
        ]

    @contextmanager
    def _generators_of_samplers_only(self) -> Iterator[None]:
        """Draw nothing from the seed of a request in the middle of its prompt.

        vLLM draws and then takes the draw back, which CPU generators cannot.
        """
        generators = self.input_batch.generators
        sampling = {i for i, _ in self._sampling_reqs()}
        hidden = {i: g for i, g in generators.items() if i not in sampling}
        for i in hidden:
            del generators[i]
        try:
            yield
        finally:
            generators.update(hidden)

    def _take_budgets_token_by_token(self) -> None:
        """Thinking budgets see one row at a time here, as without speculation."""
        holder = self.input_batch.thinking_budget_state_holder
        if holder is not None:
            holder.in_spec_mode = False
            holder.num_spec_tokens = 0
