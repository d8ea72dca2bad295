"""What duck sets in an engine, and what it refuses before anything loads."""

import json

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_duck import hooks, setup_engine
from vllm_duck.config import DuckConfig
from vllm_duck.errors import DuckConfigError

hooks.install_hooks()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("VLLM_DUCK_ENDPOINTS", raising=False)
    monkeypatch.setenv(setup_engine.RUNNER_VARIABLE, "0")
    monkeypatch.delenv(setup_engine.RUNNER_VARIABLE)


def make_args(model, duck=(), **changes):
    additional = {} if duck is None else {"duck": {} if duck == () else duck}
    return EngineArgs(
        model=str(model), max_model_len=512, additional_config=additional, **changes
    )


def test_duck_sets_its_worker_loader_and_model(tiny_model):
    config = make_args(tiny_model).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm_duck.worker.DuckWorker"
    assert config.load_config.load_format == "duck"
    assert config.model_config._model_info.architecture == "DeepseekV32ForCausalLM"
    assert DuckConfig.from_settings(config.additional_config["duck"], {})
    # Whatever the CPU: vLLM turns these off for MLA without AMX.
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching


def test_the_defaults_of_the_command_line_are_accepted(tiny_model):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    duck = '{"duck": {"local_ducks": 3}}'
    options = parser.parse_args(
        ["--model", str(tiny_model), "--additional-config", duck]
    )
    args = AsyncEngineArgs.from_cli_args(options)
    config = args.create_engine_config()
    assert config.additional_config["duck"]["local_ducks"] == 3


def test_configuring_twice_gives_the_same(tiny_model):
    args = make_args(tiny_model, duck={"local_ducks": 3})
    first = args.create_engine_config().additional_config
    assert args.create_engine_config().additional_config == first
    json.dumps(first)


def test_endpoints_in_the_environment_turn_duck_on(tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_DUCK_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
    config = make_args(tiny_model, duck=None).create_engine_config()
    duck = config.additional_config["duck"]
    assert duck["endpoints"] == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "expected"),
    [("auto", "fp8"), ("fp8", "fp8"), ("bfloat16", "bf16")],
)
def test_kv_cache_dtype_chooses_the_format(tiny_model, kv_cache_dtype, expected):
    args = make_args(tiny_model, kv_cache_dtype=kv_cache_dtype)
    assert args.create_engine_config().additional_config["duck"]["kv_dtype"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size to be 1, got 2"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size to be 1, got 2"),
        ({"data_parallel_size": 2}, "--data-parallel-size to be 1, got 2"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel to be False"),
        ({"enable_lora": True}, "--enable-lora to be False or None, got True"),
        ({"enable_dbo": True}, "--enable-dbo to be False"),
        ({"quantization": "awq"}, "--quantization to be None or 'fp8', got 'awq'"),
        ({"load_format": "dummy"}, "--load-format to be 'auto'.*got 'dummy'"),
        ({"dtype": "float16"}, "--dtype to be 'auto' or 'bfloat16', got 'float16'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype.*got 'fp8_e5m2'"),
        ({"worker_cls": "some.Worker"}, "--worker-cls.*got 'some.Worker'"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
            "to name the method duck_mtp1, got {'method': 'ngram'",
        ),
        ({"spec_method": "mtp"}, "got --spec-method 'mtp'; drop it"),
        (
            {"speculative_config": {"method": "duck_mtp1", "model": "draft"}},
            "takes no model, got 'draft'",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}},
            "cudagraph_mode NONE or PIECEWISE, got FULL",
        ),
    ],
)
def test_what_duck_cannot_do_is_refused_with_the_flag(tiny_model, changes, message):
    with pytest.raises(DuckConfigError, match=message):
        make_args(tiny_model, **changes).create_engine_config()


MTP1 = {"method": "duck_mtp1"}


@pytest.mark.parametrize(
    ("duck", "message"),
    [
        ({"endpoints": ["nonsense"]}, "host:port or unix:/path, got 'nonsense'"),
        ({"endpoints": ["http://a:1"]}, "got 'http://a:1'; correct it in duck.endp"),
        ({"token_file": "/nonexistent"}, "token_file"),
        ({"tls_ca": "/nonexistent"}, "tls_ca"),
        (False, "must be a JSON object, got False"),
    ],
)
def test_what_cannot_reach_a_duck_is_refused_before_a_process_starts(
    tiny_model, duck, message
):
    with pytest.raises(DuckConfigError, match=message):
        make_args(tiny_model, duck=duck).create_engine_config()


def test_shadow_and_drafts_contradict_each_other(tiny_model):
    args = make_args(
        tiny_model, duck={"mtp_shadow": True}, speculative_config=dict(MTP1)
    )
    with pytest.raises(DuckConfigError, match="mtp_shadow decodes plainly"):
        args.create_engine_config()


def test_the_method_turns_duck_on_and_sets_what_it_needs(tiny_model):
    args = make_args(tiny_model, duck=None, speculative_config=dict(MTP1))
    config = args.create_engine_config()
    speculative = config.speculative_config
    assert speculative.method == "mtp"
    assert speculative.num_speculative_tokens == 1
    assert speculative.disable_padded_drafter_batch
    assert speculative.draft_sample_method == "probabilistic"
    assert not config.scheduler_config.async_scheduling
    assert config.parallel_config.worker_cls == "vllm_duck.worker.DuckWorker"
    duck = DuckConfig.from_settings(config.additional_config["duck"], {})
    assert duck.num_drafts == 1
    assert setup_engine.is_duck_speculation(speculative)
    # And a second time, as vLLM may.
    again = args.create_engine_config()
    assert again.additional_config == config.additional_config


def test_the_command_line_takes_the_method(tiny_model):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    options = parser.parse_args(
        ["--model", str(tiny_model), "--speculative-config", json.dumps(MTP1)]
    )
    config = AsyncEngineArgs.from_cli_args(options).create_engine_config()
    assert config.additional_config["duck"]["num_drafts"] == 1


def test_shadow_mode_loads_the_mtp_layer_without_the_method(tiny_model):
    config = make_args(tiny_model, duck={"mtp_shadow": True}).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 1


def test_duck_alone_does_not_speculate(tiny_model):
    config = make_args(tiny_model).create_engine_config()
    assert config.speculative_config is None
    assert config.additional_config["duck"]["num_drafts"] == 0


def test_drafts_are_asked_for_by_the_method_alone(tiny_model):
    with pytest.raises(DuckConfigError, match="must come from --speculative-config"):
        make_args(tiny_model, duck={"num_drafts": 1}).create_engine_config()


def _copy_with(model_dir, out_dir, **changes):
    """The checkpoint's small files, its config changed."""
    out_dir.mkdir()
    for path in model_dir.iterdir():
        if path.suffix != ".safetensors":
            (out_dir / path.name).write_bytes(path.read_bytes())
        else:
            (out_dir / path.name).symlink_to(path)
    config = json.loads((model_dir / "config.json").read_text())
    (out_dir / "config.json").unlink()
    (out_dir / "config.json").write_text(json.dumps({**config, **changes}))
    return out_dir


@pytest.mark.parametrize("how", [{"speculative_config": MTP1}, {"duck": True}])
def test_a_checkpoint_without_an_mtp_layer_is_refused(tiny_model, tmp_path, how):
    model = _copy_with(tiny_model, tmp_path / "m", num_nextn_predict_layers=0)
    duck = {"mtp_shadow": True} if how.pop("duck", False) else None
    with pytest.raises(DuckConfigError, match="has none .num_nextn_predict_layers."):
        make_args(model, duck=duck, **how).create_engine_config()


def test_the_method_with_another_architecture_is_refused(tiny_v3_model):
    args = make_args(tiny_v3_model, duck=None, speculative_config=dict(MTP1))
    with pytest.raises(DuckConfigError, match="duck serves DeepseekV32ForCausalLM"):
        args.create_engine_config()


def test_the_v2_runner_is_refused(tiny_model, monkeypatch):
    monkeypatch.setenv(setup_engine.RUNNER_VARIABLE, "1")
    with pytest.raises(DuckConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0, got '1'"):
        make_args(tiny_model).create_engine_config()


def test_another_architecture_is_refused(tiny_v3_model):
    with pytest.raises(
        DuckConfigError, match="duck serves DeepseekV32ForCausalLM, got"
    ):
        make_args(tiny_v3_model).create_engine_config()


def test_duck_off_leaves_another_model_alone(tiny_v3_model):
    config = make_args(tiny_v3_model, duck=None).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.load_config.load_format == "auto"
    assert config.additional_config == {}


def test_duck_off_after_duck_on_gives_the_stock_model_class(tiny_model):
    from vllm.model_executor.models import ModelRegistry

    def model_class():
        return ModelRegistry.models["DeepseekV32ForCausalLM"].module_name

    make_args(tiny_model).create_engine_config()
    assert model_class() == "vllm_duck.models.deepseek_v32"
    config = make_args(tiny_model, duck=None).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert model_class() == "vllm.models.deepseek_v32"
