"""vLLM's model runner with duck's drafting and verification.

The life of a step, in order:
1. `_sample` verifies the drafts that the step's rows carry (acceptance.py);
2. vLLM's bookkeeping appends the tokens taken;
3. `propose_draft_token_ids` runs the MTP layer over the confirmed rows and drafts on
   (proposer.py), and keeps what drafts without a seed were drawn from (drafts.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_duck.config import DuckConfig
from vllm_duck.models.moe import Ducks
from vllm_duck.models.overlap import OverlapMeter
from vllm_duck.spec_decode.acceptance import DuckRejectionSampler, VerifyBatch
from vllm_duck.spec_decode.drafts import Draft, DraftBook
from vllm_duck.spec_decode.plain_sampler import PlainSampler, Row
from vllm_duck.spec_decode.proposer import DuckProposer
from vllm_duck.spec_decode.shadow import Shadow


class DuckModelRunner(CPUModelRunner):
    """Without `duck_mtp1` it is vLLM's own, but for seeds in a chunked prefill."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = DuckConfig.from_settings(vllm_config.additional_config["duck"], {})
        self.drafts = DraftBook()
        self.shadow: Shadow | None = None
        if self.speculative_config is None:
            return
        self.duck_sampler = PlainSampler(self.sampler)
        self.verifier = DuckRejectionSampler(self.duck_sampler)
        self.drafter: DuckProposer = DuckProposer(
            vllm_config, device, self, sampler=self.duck_sampler
        )
        if config.mtp_shadow:
            self.shadow = Shadow()
        self._take_budgets_token_by_token()

    def attach_ducks(self, ducks: Ducks) -> None:
        self.model.attach_ducks(ducks)
        if self.speculative_config is not None:
            self.drafter.model.attach_ducks(ducks)

    @property
    def meter(self) -> OverlapMeter:
        meter: OverlapMeter = self.model.model.meter
        return meter

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        self._take_budgets_token_by_token()

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
        output = self.verifier(batch, logits, self.input_batch.sampling_metadata)
        if self.shadow is not None:
            assert output.sampled_token_ids.shape[1] == 1
            row = self.verifier.first_row
            for i, req_id in self._sampling_reqs():
                self.shadow.compare(req_id, row, i)
        return output

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.shadow is None:
            token_ids: Tensor = super().propose_draft_token_ids(*args, **kwargs)
            self._keep_drafts(self.drafter.rows)
            return token_ids
        with torch.random.fork_rng(devices=[]):
            token_ids = super().propose_draft_token_ids(*args, **kwargs)
        for i, req_id in self._sampling_reqs():
            self.shadow.remember(req_id, self.drafter.rows[0], i)
        return token_ids

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return None if self.shadow else super().take_draft_token_ids()

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

    def _keep_drafts(self, rows: list[Row]) -> None:
        """Remember what drafts of requests without a seed were drawn from."""
        batch = self.input_batch
        kept = [
            (i, req_id)
            for i, req_id in self._sampling_reqs()
            if req_id in batch.random_reqs and i not in batch.generators
        ]
        if not kept:
            return
        req_indices = [i for i, _ in kept]
        probs = torch.stack([row.probs(req_indices) for row in rows], 1)
        tokens = torch.stack([row.token_ids[req_indices] for row in rows], 1).tolist()
        for row, (_, req_id) in enumerate(kept):
            self.drafts.put(req_id, Draft(tuple(tokens[row]), probs[row]))

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
