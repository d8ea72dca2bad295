"""Each field of vLLM's configuration is decided; what is refused says so itself."""

import dataclasses
import re
from pathlib import Path

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_duck import engine_environ, hooks
from vllm_duck.errors import DuckConfigError
from vllm_duck.limits import LIMITS, check_config

hooks.install_hooks()

PAGE = (Path(__file__).parent.parent / "docs" / "vllm-options.md").read_text()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("VLLM_DUCK_ENDPOINTS", raising=False)
    monkeypatch.setenv(engine_environ.RUNNER_VARIABLE, "0")
    monkeypatch.delenv(engine_environ.RUNNER_VARIABLE)
    monkeypatch.setattr(engine_environ, "_chosen", set())


def make_args(model, **changes):
    options = {"max_model_len": 512, "additional_config": {"duck": {}}, **changes}
    return EngineArgs(model=str(model), **options)


@pytest.fixture(scope="module")
def config(tiny_model):
    return make_args(tiny_model).create_engine_config()


def _is_record(value):
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record and type(value).__module__.startswith("vllm.")


def _paths(record, prefix=""):
    for field in dataclasses.fields(record):
        value, path = getattr(record, field.name), f"{prefix}{field.name}"
        if _is_record(value):
            yield from _paths(value, f"{path}.")
        else:
            yield path


def _decided():
    """Paths of the page's lists; one that is a record stands for all below it."""
    _, *sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for section in sections[1:]:
        for bullet in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
            head, _, rest = bullet.partition(":")
            (record, *_) = re.findall("`(.+?)`", head)
            fields = re.findall("`(.+?)`", rest)
            yield from [f"{record}.{field}" for field in fields] or [record]


def test_every_field_of_the_configuration_is_decided_once(config):
    decided = [*_decided(), *{limit.field for limit in LIMITS if limit.field}]
    for path in _paths(config):
        parts = path.split(".")
        prefixes = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        found = [one for one in decided if one in prefixes]
        # One field of compilation_config is refused, and the others are all alike.
        longest = [one for one in found if one == path] or found
        assert len(longest) == 1, (path, found)
    assert len(decided) == len(set(decided))


def test_the_page_names_every_refused_option():
    refused = PAGE.partition("## Work as in vLLM")[0]
    for limit in LIMITS:
        assert f"`{limit.flag}`" in refused, limit.flag


def test_every_limit_looks_at_something_that_is_there(config, tiny_model):
    args = make_args(tiny_model)
    for limit in LIMITS:
        for root, path in ((args, limit.argument), (config, limit.field)):
            for name in path.split(".") if path else ():
                root = getattr(root, name)


REFUSED = [
    ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size to be 1"),
    ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size to be 1"),
    ({"nnodes": 2}, "--nnodes to be 1, got 2"),
    (
        {"distributed_executor_backend": "ray"},
        "--distributed-executor-backend to be 'mp' or 'uni', got 'ray'",
    ),
    ({"enable_eplb": True}, "--enable-eplb to be False, got True: the ducks hold"),
    ({"enable_elastic_ep": True}, "--enable-elastic-ep"),
    ({"enable_batch_sharded_sampling": True}, "--enable-batch-sharded-sampling"),
    ({"ubatch_size": 2}, "--ubatch-size"),
    ({"model_impl": "transformers"}, "--model-impl to be 'auto' or 'vllm', got 'tr"),
    ({"model_weights": "s3://a/b"}, "--model-weights to be absent, got 's3://a/b'"),
    ({"runner": "pooling"}, "--runner to be 'auto' or 'generate', got 'pooling'"),
    ({"convert": "embed"}, "--convert to be 'auto' or 'none', got 'embed'"),
    ({"config_format": "mistral"}, "--config-format"),
    ({"code_revision": "main"}, "--code-revision to be absent"),
    ({"enable_sleep_mode": True}, "--enable-sleep-mode to be False"),
    ({"enable_cumem_allocator": True}, "--enable-cumem-allocator"),
    ({"weight_transfer_config": {"backend": "ipc"}}, "--weight-transfer-config"),
    ({"cpu_offload_gb": 1}, "--cpu-offload-gb to be 0, got 1: packed weights stay"),
    ({"offload_group_size": 2}, "--offload-group-size to be 0, got 2"),
    ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
    ({"enable_trace_replay": True}, "--enable-trace-replay"),
    ({"return_sampling_mask": True}, "--return-sampling-mask"),
    (
        {"enable_return_routed_experts": True},
        "--enable-return-routed-experts to be False, got True: .*V2 model runner",
    ),
    (
        {"aux_output_config": {"enable_return_routed_experts": True}},
        "--enable-return-routed-experts",
    ),
    ({"watermark_config": {"key": 1}}, "--watermark-config to be absent"),
    ({"diffusion_config": {"a": 1}}, "--diffusion-config to be absent"),
    ({"kv_offloading_size": 4.0}, "--kv-offloading-size to be absent, got 4.0: the f"),
    ({"kv_cache_dtype_skip_layers": ["0"]}, "--kv-cache-dtype-skip-layers"),
    ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    ({"attention_backend": "CPU_MLA"}, "--attention-backend to be absent"),
    (
        {"attention_config": {"indexer_kv_dtype": "fp8"}},
        "indexer_kv_dtype of --attention-config to be 'auto', got 'fp8'",
    ),
    (
        {"attention_config": {"hisparse_config": {}}},
        "hisparse_config of --attention-config",
    ),
    ({"async_scheduling": True}, "--async-scheduling to be False, got True"),
    ({"scheduler_cls": "some.Scheduler"}, "--scheduler-cls to be .vllm_duck.lost"),
    ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "cudagraph_mode"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_an_argument_is_refused_in_one_sentence(tiny_model, changes, message):
    with pytest.raises(DuckConfigError, match=message):
        make_args(tiny_model, **changes).create_engine_config()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_config.runner", "pooling", "--runner"),
        ("kv_transfer_config", object(), "--kv-transfer-config to be absent"),
        ("cache_config.kv_offloading_size", 1.0, "--kv-offloading-size"),
        ("lora_config", object(), "--enable-lora to be False, got <object"),
        ("parallel_config.tensor_parallel_size", 2, "--tensor-parallel-size"),
        ("model_config.dtype", "torch.float16", "--dtype to be torch.bfloat16"),
        ("offload_config.uva.cpu_offload_gb", 1.0, "--cpu-offload-gb"),
    ],
)
def test_the_finished_configuration_is_checked_too(
    config, monkeypatch, path, value, message
):
    *parents, name = path.split(".")
    record = config
    for parent in parents:
        record = getattr(record, parent)
    check_config(config)
    monkeypatch.setattr(record, name, value)
    with pytest.raises(DuckConfigError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 3, "max_logprobs": 5, "logprobs_mode": "processed_logprobs"},
        {"block_size": 16, "num_gpu_blocks_override": 64},
        {"enable_prefix_caching": False, "enable_chunked_prefill": True},
        {"enforce_eager": True, "performance_mode": "throughput"},
        {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "scheduling_policy": "priority",
        },
        {"reasoning_parser": "deepseek_r1", "disable_log_stats": True},
        {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        {"hf_overrides": {"rope_theta": 20000.0}},
        {"moe_backend": "triton", "use_tqdm_on_load": False},
        {"worker_extension_cls": "some.Extension", "tokenizer_mode": "hf"},
    ],
    ids=str,
)
def test_what_works_and_what_has_no_effect_makes_a_configuration(tiny_model, changes):
    args = make_args(tiny_model, **changes)
    assert args.create_engine_config().load_config.load_format == "duck"


def test_no_default_of_the_command_line_is_refused(tiny_model):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--additional-config", '{"duck": {}}', "--max-model-len", "512"]
    options = parser.parse_args(["--model", str(tiny_model), *flags])
    args = AsyncEngineArgs.from_cli_args(options)
    assert args.create_engine_config().load_config.load_format == "duck"
