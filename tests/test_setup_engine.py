"""What duck sets in an engine, and what it refuses before anything loads."""

import copy
import json
import os

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from testing.engine_args import make_args
from vllm_duck import engine_environ, hooks, setup_engine
from vllm_duck.config import DuckConfig, HandOver
from vllm_duck.errors import DuckCheckpointError, DuckConfigError

hooks.install_hooks()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("VLLM_DUCK_ENDPOINTS", raising=False)
    for variable in (engine_environ.RUNNER_VARIABLE, engine_environ.STOP_VARIABLE):
        monkeypatch.setenv(variable, "0")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(engine_environ, "_chosen", set())


def test_duck_sets_its_worker_loader_and_model(tiny_model):
    config = make_args(tiny_model).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm_duck.cpu_worker.CpuDuckWorker"
    assert config.load_config.load_format == "duck"
    assert config.model_config._model_info.architecture == "TargetForCausalLM"
    assert DuckConfig.of(config) == DuckConfig()
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "bfloat16"},
        {"speculative_config": {"method": "duck_mtp1"}},
        {"spec_method": "duck_mtp1"},
        {"duck": {"mtp_shadow": True}},
        {"served_model_name": "name"},
    ],
    ids=str,
)
def test_configuring_twice_gives_the_same(tiny_model, changes):
    args = make_args(tiny_model, **changes)
    before = copy.deepcopy(args)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert args == before
    json.dumps(first.additional_config)
    assert DuckConfig.of(first) == DuckConfig.of(second)
    assert HandOver.of(first).kv_dtype == HandOver.of(second).kv_dtype
    for config in (first, second):
        speculates = bool({"speculative_config", "spec_method", "duck"} & set(changes))
        assert (config.speculative_config is not None) == speculates
        assert config.model_config.served_model_name == changes.get(
            "served_model_name", str(tiny_model)
        )


def test_the_api_server_finds_the_reasoning_parser(tiny_model):
    """vLLM writes it into a record of the arguments, and the server reads it there."""
    args = make_args(tiny_model, reasoning_parser="deepseek_v3")
    args.create_engine_config()
    assert args.structured_outputs_config.reasoning_parser == "deepseek_v3"


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
    assert HandOver.of(args.create_engine_config()).kv_dtype == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size to be 1, got 2"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size to be 1, got 2"),
        ({"data_parallel_size": 2}, "--data-parallel-size to be 1, got 2"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel to be False"),
        ({"enable_lora": True}, "--enable-lora to be False, got True: the ducks"),
        ({"enable_dbo": True}, "--enable-dbo to be False"),
        ({"quantization": "awq"}, "--quantization to be 'fp8', got 'awq'"),
        ({"load_format": "dummy"}, "--load-format to be 'auto'.*got 'dummy'"),
        ({"dtype": "float16"}, "--dtype to be 'auto' or 'bfloat16', got 'float16'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype.*got 'fp8_e5m2'"),
        ({"worker_cls": "some.Worker"}, "--worker-cls.*got 'some.Worker'"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
            "to name the method duck_mtp or duck_mtp1, got {'method': 'ngram'",
        ),
        ({"spec_method": "mtp"}, "or duck_mtp1, got {'method': 'mtp'}"),
        (
            {"additional_config": {"duck_hand_over": {}}},
            "must have no 'duck_hand_over'",
        ),
        (
            {"model_class_overrides": {"DeepseekV32ForCausalLM": "a:B"}},
            "own model class for DeepseekV32ForCausalLM, got 'a:B'",
        ),
        (
            {"speculative_config": {"method": "duck_mtp1", "model": "draft"}},
            "takes no model, got 'draft'",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}},
            "cudagraph_mode of .* to be NONE or PIECEWISE, got FULL: full graphs",
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
    assert config.parallel_config.worker_cls == "vllm_duck.cpu_worker.CpuDuckWorker"
    assert setup_engine.is_duck_speculation(speculative)


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config", json.dumps(MTP1)],
        ["--spec-method", "duck_mtp1"],
        ["--spec-method=duck_mtp1", "--spec-tokens=1"],
    ],
)
def test_the_command_line_takes_the_method(tiny_model, flags):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    options = parser.parse_args(["--model", str(tiny_model), *flags])
    config = AsyncEngineArgs.from_cli_args(options).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 1
    assert config.parallel_config.worker_cls == "vllm_duck.cpu_worker.CpuDuckWorker"


def test_the_command_line_still_refuses_what_is_no_method(capsys):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--spec-method", "duck_mtp9"])
    assert "'mtp', " in capsys.readouterr().err


def test_shadow_mode_loads_the_mtp_layer_without_the_method(tiny_model):
    config = make_args(tiny_model, duck={"mtp_shadow": True}).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 1


def test_duck_alone_does_not_speculate(tiny_model):
    config = make_args(tiny_model).create_engine_config()
    assert config.speculative_config is None


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
    monkeypatch.setenv(engine_environ.RUNNER_VARIABLE, "1")
    with pytest.raises(DuckConfigError, match="VLLM_USE_V2_MODEL_RUNNER=0, got '1'"):
        make_args(tiny_model).create_engine_config()


def test_another_architecture_is_refused(tiny_v3_model):
    with pytest.raises(
        DuckConfigError, match="duck serves DeepseekV32ForCausalLM or .*, got"
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
    assert model_class() == "vllm_duck.models.target"
    config = make_args(tiny_model, duck=None).create_engine_config()
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert model_class() == "vllm.models.deepseek_v32"


def test_a_refusal_leaves_no_trace(tiny_model, tmp_path):
    """By the arguments, by vLLM itself, and on the finished configuration."""
    from vllm.model_executor.models import ModelRegistry

    def trace():
        model = ModelRegistry.models["DeepseekV32ForCausalLM"].module_name
        return os.environ.get(engine_environ.RUNNER_VARIABLE), model

    make_args(tiny_model, duck=None).create_engine_config()
    before = trace()
    for model, changes, message in (
        (
            tiny_model,
            {"speculative_config": {"method": "ngram"}},
            "the method duck_mtp or duck_mtp1",
        ),
        (tiny_model, {"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype"),
        (tiny_model, {"max_num_seqs": 0}, "max_num_seqs"),
        (
            _copy_with(tiny_model, tmp_path / "m", indexer_rope_interleave=True),
            {},
            "indexer_rope_interleave must be False, got True",
        ),
    ):
        args = make_args(model, **changes)
        given = copy.deepcopy(args)
        with pytest.raises(ValueError, match=message):
            args.create_engine_config()
        assert trace() == before
        assert args == given
    assert before == (None, "vllm.models.deepseek_v32")


def test_a_refusal_leaves_an_earlier_engine_with_ducks_alone(tiny_model):
    make_args(tiny_model).create_engine_config()
    with pytest.raises(ValueError, match="max_num_seqs"):
        make_args(tiny_model, max_num_seqs=0).create_engine_config()
    assert os.environ[engine_environ.RUNNER_VARIABLE] == "0"
    make_args(tiny_model, duck=None).create_engine_config()
    assert engine_environ.RUNNER_VARIABLE not in os.environ


def test_a_user_s_own_choice_of_the_runner_stays(tiny_model, monkeypatch):
    monkeypatch.setenv(engine_environ.RUNNER_VARIABLE, "0")
    make_args(tiny_model).create_engine_config()
    make_args(tiny_model, duck=None).create_engine_config()
    assert os.environ[engine_environ.RUNNER_VARIABLE] == "0"


def test_experts_that_no_duck_reads_are_refused_before_anything_loads(
    tiny_model, tmp_path
):
    model = _copy_with(
        tiny_model, tmp_path / "m", quantization_config={"quant_method": "awq"}
    )
    with pytest.raises(DuckCheckpointError, match="quantization_config says awq"):
        make_args(model).create_engine_config()


def test_a_model_without_experts_is_refused(tiny_model, tmp_path):
    model = _copy_with(tiny_model, tmp_path / "m", first_k_dense_replace=4)
    with pytest.raises(DuckConfigError, match="none of the 4 layers has them"):
        make_args(model).create_engine_config()
