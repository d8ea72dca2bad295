"""What of vLLM is overridden or read without being public, and why: a ledger.

`hooks.HOOKS` says what is wrapped; this says what our subclasses rely on. A method
that the next vLLM renames would otherwise be silently dead code in ours. `check_seams`
runs in the worker before its runner is built; `scripts/check_vllm.py` holds both
ledgers, and the bodies that we follow, against the source of any version.
"""

from vllm_duck.errors import DuckError
from vllm_duck.seam import Seam, seam_problem

# Releases whose source was held against the ledgers without a difference, and which no
# engine ran: there is no CPU wheel of them yet.
READ_NOT_RUN = ("0.33.0",)


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner."
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker."
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer."
_SAMPLER = "vllm.v1.sample.sampler:Sampler."
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_KV_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager."
_THINKING = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder."

_NO_RUNNER_SEAM = "vLLM takes a proposer and a verifier as plugins"
_NO_FAILED_STEP = "vLLM's scheduler lives on after a step that failed"
_NO_SAMPLER_VIEW = "vLLM's sampler hands out the distribution it drew from"
_ORDERLY_END = "vLLM stops reading outputs after its engine has ended"

SEAMS = (
    Seam(
        target=_CPU_WORKER + "init_device",
        use="override",
        why="builds the runner; hooks.using_cpu_runner swaps its class meanwhile",
        remove_when="CPUWorker asks _make_model_runner, as the GPU worker does",
        parameters="self",
        bodies=("a7e93c6997d4e6c2",),
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUModelRunner",
        use="call",
        why="the name that init_device builds, swapped meanwhile",
        remove_when="CPUWorker asks _make_model_runner, as the GPU worker does",
        parameters="vllm_config device",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        use="override",
        why="wrapped while the runner is built: all processors under speculation too",
        remove_when="vLLM's rejection sampler applies every logits processor",
        parameters=(
            "vllm_config device is_pin_memory is_pooling_model custom_logitsprocs"
        ),
    ),
    Seam(
        target=_CPU_WORKER + "determine_available_memory",
        use="override",
        why="hooks.page_cache_is_free counts a container's page cache as free",
        remove_when="get_cgroup_memory_usage leaves the page cache out",
        parameters="self",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        use="override",
        why="tells the ducks that a step begins, and how long it may wait for them",
        remove_when="a worker hears of a step's deadline",
        parameters="self scheduler_output",
    ),
    Seam(
        target=_SCHEDULER + "schedule",
        use="override",
        why="notes which requests a step has",
        remove_when=_NO_FAILED_STEP,
        parameters="self throttle_prefills",
    ),
    Seam(
        target=_SCHEDULER + "finish_requests",
        use="override",
        why="notes the blocks of requests that are aborted while their step runs",
        remove_when=_NO_FAILED_STEP,
        parameters="self request_ids finished_status",
    ),
    Seam(
        target=_SCHEDULER + "update_from_output",
        use="override",
        why="ends the requests of a failed step, and evicts what it was to write",
        remove_when=_NO_FAILED_STEP,
        parameters="self scheduler_output model_runner_output",
    ),
    Seam(
        target=_SCHEDULER + "grammar_compile_error_reqs",
        use="read",
        why="update_from_output ends the requests in it with an error",
        remove_when=_NO_FAILED_STEP,
    ),
    Seam(
        target=_SCHEDULER + "block_size",
        use="read",
        why="which blocks a step writes",
        remove_when=_NO_FAILED_STEP,
    ),
    Seam(
        target=_KV_MANAGER + "evict_blocks",
        use="call",
        why="takes blocks that were not written out of the prefix cache",
        remove_when=_NO_FAILED_STEP,
        parameters="self block_ids",
    ),
    Seam(
        target=_KV_MANAGER + "get_block_ids",
        use="call",
        why="which blocks a step writes",
        remove_when=_NO_FAILED_STEP,
        parameters="self request_id",
    ),
    Seam(
        target=_RUNNER + "_draft_token_req_ids",
        use="read",
        why="cleared after a failed step: its drafts are those of an earlier one",
        remove_when=_NO_RUNNER_SEAM,
    ),
    Seam(
        target="vllm.utils.cpu_resource_utils:get_cgroup_memory_usage",
        use="override",
        why="wrapped while the worker and kv_space look for memory",
        remove_when="it leaves the page cache out",
    ),
    Seam(
        target=_CPU_RUNNER + "load_model",
        use="override",
        why="hands the lanes to the model that it loaded",
        remove_when=_NO_RUNNER_SEAM,
        parameters="self load_dummy_weights",
    ),
    Seam(
        target=_RUNNER + "execute_model",
        use="override",
        why="notes what the scheduler asked, for the draft gate",
        remove_when=_NO_RUNNER_SEAM,
        parameters="self scheduler_output intermediate_tensors",
    ),
    Seam(
        target=_RUNNER + "sample_tokens",
        use="override",
        why="hides seeds of requests in their prompt, times the step",
        remove_when=_NO_RUNNER_SEAM,
        parameters="self grammar_output",
        bodies=("676d69ef1bd994c9",),
    ),
    Seam(
        target=_RUNNER + "_sample",
        use="override",
        why="verifies drafts row by row",
        remove_when=_NO_RUNNER_SEAM,
        parameters="self logits spec_decode_metadata",
        bodies=("b0a3eb54f8244cc3",),
    ),
    Seam(
        target=_RUNNER + "propose_draft_token_ids",
        use="override",
        why="replaced: the MTP layer runs over the confirmed rows alone",
        remove_when=_NO_RUNNER_SEAM,
        parameters=(
            "self scheduler_output sampled_token_ids sampling_metadata "
            "hidden_states sample_hidden_states aux_hidden_states "
            "spec_decode_metadata common_attn_metadata slot_mappings"
        ),
        bodies=(
            "8ff5105e3e204020",
            # 0.33.0: the method medusa is gone.
            "88db83066cb14c5e",
        ),
    ),
    Seam(
        target=_RUNNER + "take_draft_token_ids",
        use="override",
        why="the gate drops drafts that do not pay",
        remove_when=_NO_RUNNER_SEAM,
        parameters="self",
        bodies=("690ee4e4968526fe",),
    ),
    Seam(
        target=_RUNNER + "_input_fits_in_drafter",
        use="override",
        why="replaced: skipping a batch would leave holes in the MTP cache",
        remove_when="vLLM decides it request by request",
        parameters="self common_attn_metadata",
        bodies=("fb4b41f327e71ba9",),
    ),
    Seam(
        target=_RUNNER + "_on_request_state_removed",
        use="override",
        why="forgets a request's pending draft",
        remove_when="the runner calls a hook when a request ends",
        parameters="self req_id req_state",
    ),
    Seam(
        target=_RUNNER + "may_reinitialize_input_batch",
        use="override",
        why="a new input batch has a new thinking budget holder",
        remove_when="thinking budgets are counted in tokens taken",
        parameters="self kv_cache_config",
    ),
    Seam(
        target=_RUNNER + "_get_positions",
        use="call",
        why="positions of the step",
        remove_when=_NO_RUNNER_SEAM,
        parameters="self num_tokens",
    ),
    Seam(
        target=_RUNNER + "discard_request_mask",
        use="read",
        why="requests that take no token in this step",
        remove_when=_NO_RUNNER_SEAM,
    ),
    Seam(
        target=_PROPOSER + "prepare_next_token_ids_cpu",
        use="call",
        why="the token behind each request's last row",
        remove_when=_NO_RUNNER_SEAM,
        parameters=(
            "self sampled_token_ids requests gpu_input_batch num_scheduled_tokens"
        ),
        bodies=("3845518c35985b7b",),
    ),
    Seam(
        target=_PROPOSER + "_maybe_share_embeddings",
        use="override",
        why="replaced: the MTP layer shares the target's embedding unless it differs",
        remove_when="vLLM asks the draft model",
        parameters="self target_language_model",
    ),
    Seam(
        target=_PROPOSER + "_maybe_share_lm_head",
        use="override",
        why="replaced: the MTP layer shares the target's head unless it differs",
        remove_when="vLLM asks the draft model",
        parameters="self target_language_model",
    ),
    Seam(
        target=_SAMPLER + "forward",
        use="call",
        why="its order of steps is repeated by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters=(
            "self logits sampling_metadata predict_bonus_token logprobs_mode_override"
        ),
        bodies=(
            "8b5f66f1d4153f53",
            # 0.33.0: a fused kernel first, where ROCm has it.
            "a0aac9ac4137b763",
        ),
    ),
    Seam(
        target=_SAMPLER + "sample",
        use="call",
        why="its order of steps is repeated by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="self logits sampling_metadata logprobs_mode_override",
        bodies=("5ee5f9cba528424e",),
    ),
    Seam(
        target=_SAMPLER + "apply_logits_processors",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="self logits sampling_metadata predict_bonus_token",
    ),
    Seam(
        target=_SAMPLER + "apply_temperature",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="logits temp all_random",
    ),
    Seam(
        target=_SAMPLER + "greedy_sample",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="logits",
    ),
    Seam(
        target=_SAMPLER + "compute_logprobs",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="logits",
    ),
    Seam(
        target=_SAMPLER + "gather_logprobs",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="logprobs num_logprobs token_ids",
    ),
    Seam(
        target=_SAMPLER + "gather_specific_token_logprobs",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="self logprobs logprob_token_ids sampled",
    ),
    Seam(
        target="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        use="call",
        why="called by PlainSampler",
        remove_when=_NO_SAMPLER_VIEW,
        parameters="logits k p",
    ),
    Seam(
        target=_THINKING + "_state",
        use="read",
        why="kept for requests that take no token at a row",
        remove_when="thinking budgets are counted in tokens taken",
    ),
    Seam(
        target=_THINKING + "in_spec_mode",
        use="read",
        why="set to False: budgets see one row at a time",
        remove_when="thinking budgets are counted in tokens taken",
    ),
    Seam(
        target=_THINKING + "num_spec_tokens",
        use="read",
        why="set to 0: budgets see one row at a time",
        remove_when="thinking budgets are counted in tokens taken",
    ),
    Seam(
        target="vllm.envs:environment_variables",
        use="read",
        why="the package's own variables are named there, or vLLM warns of them",
        remove_when="a plugin may name variables",
    ),
    Seam(
        target="vllm.config.model:_REGISTERED_MODEL_CLASS_OVERRIDES",
        use="read",
        why="cleared when an engine without ducks follows one with them",
        remove_when="model_class_overrides end with their engine",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_VLLM_MODELS",
        use="read",
        why="read to restore vLLM's own class then",
        remove_when="model_class_overrides end with their engine",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_resolve_module_name",
        use="call",
        why="called to restore vLLM's own class then",
        remove_when="model_class_overrides end with their engine",
        parameters="mod_relname",
    ),
    Seam(
        target="vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER",
        use="read",
        why="whether the loader is registered already",
        remove_when="register_model_loader may be called twice in silence",
    ),
    Seam(
        target="vllm.v1.engine.utils:CoreEngineProcManager._finalizer",
        use="read",
        why="who stops the engine first, the server or vLLM's monitor",
        remove_when=_ORDERLY_END,
    ),
    Seam(
        target="vllm.v1.engine.core_client:BackgroundResources.engine_manager",
        use="read",
        why="is stopped before its outputs are no longer read",
        remove_when=_ORDERLY_END,
    ),
    Seam(
        target="vllm.v1.engine.core_client:BackgroundResources.engine_dead",
        use="read",
        why="whether the engine died before its end was asked for",
        remove_when=_ORDERLY_END,
    ),
    Seam(
        target="vllm.v1.engine.async_llm:AsyncLLM.output_handler",
        use="read",
        why="the task that reads the outputs",
        remove_when=_ORDERLY_END,
    ),
)


def check_seams() -> None:
    """Look every name of the ledger up in the vLLM that is installed.

    Raises:
        DuckError: a name is gone, or takes other parameters.
    """
    for seam in SEAMS:
        problem = seam_problem(seam)
        if problem:
            raise DuckError(
                f"{seam.target} {problem} in this vLLM; vllm_duck relies on it "
                f"({seam.why}): see scripts/check_vllm.py"
            )
