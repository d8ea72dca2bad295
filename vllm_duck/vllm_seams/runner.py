"""What the runner, its proposer and its sampler rely on."""

from vllm_duck.seam import Seam

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner."
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer."
_SAMPLER = "vllm.v1.sample.sampler:Sampler."
_THINKING = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder."
_BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch."

_NO_RUNNER_SEAM = "vLLM takes a proposer and a verifier as plugins"
_NO_FAILED_STEP = "vLLM's scheduler lives on after a step that failed"
_NO_SAMPLER_VIEW = "vLLM's sampler hands out the distribution it drew from"

RUNNER_SEAMS = (
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
        target=_RUNNER + "_draft_token_req_ids",
        use="read",
        why="cleared after a failed step: its drafts are those of an earlier one",
        remove_when=_NO_RUNNER_SEAM,
    ),
    Seam(
        target=_RUNNER + "_draft_token_ids",
        use="read",
        why="cleared after a failed step: its drafts are those of an earlier one",
        remove_when=_NO_FAILED_STEP,
    ),
    Seam(
        target=_BATCH + "random_reqs",
        use="read",
        why="whose drafts are drawn, so that their distributions are kept",
        remove_when=_NO_RUNNER_SEAM,
    ),
    Seam(
        target=_BATCH + "generators",
        use="read",
        why="which requests have a seed",
        remove_when=_NO_RUNNER_SEAM,
    ),
    Seam(
        target=_BATCH + "req_output_token_ids",
        use="read",
        why="what penalties and bad words of drafts count",
        remove_when=_NO_RUNNER_SEAM,
    ),
    Seam(
        target=_BATCH + "thinking_budget_state_holder",
        use="read",
        why="sees one row at a time, see ThinkingBudgetStateHolder",
        remove_when="thinking budgets are counted in tokens taken",
    ),
    Seam(
        target="vllm.v1.worker.block_table:BlockTable.num_blocks_per_row",
        use="read",
        why="no draft is written outside a request's blocks",
        remove_when=_NO_RUNNER_SEAM,
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
)
