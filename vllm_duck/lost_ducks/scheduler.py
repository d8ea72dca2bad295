"""vLLM's scheduler, which lives on after a step that failed for want of a duck.

vLLM enters a block into the prefix cache when it allocates it, before the step that
writes it has run. So after a failed step:
- its requests end with an error, and with them their drafts and what the MTP layer has
  cached of them;
- no block that the step was to write is ever a prefix hit, be its request among them
  or aborted while the step ran.
Requests that were not in the step keep all they have.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus


@dataclass
class FailedStep(ModelRunnerOutput):
    """What the worker returns of a step in which a duck was not to be had."""

    error: str = ""

    @classmethod
    def of(cls, scheduler_output: Any, error: str) -> "FailedStep":
        req_ids = list(scheduler_output.num_scheduled_tokens)
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        return cls(req_ids=req_ids, req_id_to_index=index, error=error)


class DuckScheduler(Scheduler):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of the step that runs: how many tokens of each request, and the blocks of
        # requests that were aborted meanwhile.
        self._in_step: dict[str, int] = {}
        self._aborted_blocks: set[int] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self._in_step = output.num_scheduled_tokens
        return output

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> Any:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        chosen = self.requests if request_ids is None else list(request_ids)
        for req_id in self._in_step.keys() & set(chosen):
            self._aborted_blocks |= self._written_blocks(req_id)
        return super().finish_requests(
            None if request_ids is None else chosen, finished_status
        )

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, Any]:
        error = None
        if isinstance(model_runner_output, FailedStep):
            error = model_runner_output.error
            blocks = self._aborted_blocks.union(
                *map(self._written_blocks, self._in_step)
            )
            self.kv_cache_manager.evict_blocks(blocks)
            # vLLM's own way to end requests with an error after a step.
            self.grammar_compile_error_reqs.update(self._in_step)
        self._in_step, self._aborted_blocks = {}, set()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if error is not None:
            _give_reason(outputs, error)
        return outputs

    def _written_blocks(self, req_id: str) -> set[int]:
        """The blocks that the step that runs writes for a request, by id."""
        request = self.requests.get(req_id)
        if request is None or request.is_finished():
            return set()
        num_before = request.num_computed_tokens - self._in_step[req_id]
        first = max(0, num_before) // self.block_size
        groups = self.kv_cache_manager.get_block_ids(req_id)
        return {block for blocks in groups for block in blocks[first:]}


def _give_reason(outputs: dict[int, Any], error: str) -> None:
    for of_client in outputs.values():
        for output in of_client.outputs:
            if output.finish_reason is FinishReason.ERROR:
                output.stop_reason = error
