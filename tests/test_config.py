"""DuckConfig: what it takes, what it refuses, and how it says so."""

import ast
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import vllm_duck
from vllm_duck.config import (
    HAND_OVER_KEY,
    SETTINGS_KEY,
    DuckConfig,
    HandOver,
    is_duck_engine,
)
from vllm_duck.errors import DuckConfigError


def test_defaults_start_two_local_ducks():
    config = DuckConfig.from_settings({}, {})
    assert config.endpoints == ()
    assert config.local_ducks == 2


def test_endpoints_come_from_settings_before_the_environment():
    environ = {"VLLM_DUCK_ENDPOINTS": "a:1, unix:/tmp/b"}
    assert DuckConfig.from_settings({}, environ).endpoints == ("a:1", "unix:/tmp/b")
    settings = {"endpoints": ["c:1"]}
    assert DuckConfig.from_settings(settings, environ).endpoints == ("c:1",)


def test_replicas_are_a_list_or_stand_between_bars():
    environ = {"VLLM_DUCK_ENDPOINTS": "a:1|b:1, c:1"}
    config = DuckConfig.from_settings({"endpoints": [["a:1", "b:1"], "c:1"]}, {})
    assert config == DuckConfig.from_settings({}, environ)
    assert config == DuckConfig.from_settings(config.to_settings(), {})
    assert config.endpoints == ("a:1|b:1", "c:1")


def test_settings_survive_a_round_trip():
    config = DuckConfig.from_settings(
        {"endpoints": ["a:1", "b:1"], "deadline_s": 3, "reply_dtype": "fp32"}, {}
    )
    assert DuckConfig.from_settings(config.to_settings(), {}) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoint": ["a:1"]}, r"unknown keys \['endpoint'\].*known keys.*endpoints"),
        ({"endpoints": "a:1"}, "endpoints must be a list of strings, got 'a:1'"),
        ({"endpoints": ["a:1", "a:1"]}, "each endpoint once"),
        ({"endpoints": [["a:1", "b:1"], "b:1"]}, "each endpoint once"),
        ({"endpoints": [["a:1", 2]]}, "endpoints must be a list of strings"),
        ({"endpoints": [[]]}, "must be host:port or unix:/path, got ''"),
        ({"endpoints": [""]}, "must be host:port or unix:/path, got ''"),
        ({"endpoints": ["a:1 b:2"]}, "must be host:port .*, got 'a:1 b:2'"),
        ({"local_ducks": 0}, "local_ducks must be >= 1, got 0"),
        ({"local_ducks": True}, "local_ducks must be an integer, got True"),
        ({"local_ducks": "2"}, "local_ducks must be an integer, got '2'"),
        ({"local_threads": 0}, "local_threads must be >= 1"),
        (
            {"deadline_s": -1.0},
            r"deadline_s must be > 0 and <= 86400, got -1.0; set additional",
        ),
        ({"deadline_s": float("nan")}, "deadline_s must be > 0 .*, got nan"),
        ({"deadline_s": float("inf")}, "deadline_s must be .* <= 86400, got inf"),
        ({"recover_s": -1}, "recover_s must be >= 0 .*, got -1"),
        ({"connect_s": -1}, "connect_s must be >= 0 .*, got -1"),
        ({"deadline_s": "1"}, "deadline_s must be a number of seconds"),
        ({"reply_dtype": "fp8"}, "reply_dtype must be"),
        ({"transport": "tcp"}, "transport must be"),
        ({"reply_dtype": 3}, 'reply_dtype must be "bf16" or "fp32", got 3'),
        ({"token_file": 3}, "token_file must be a string, got 3"),
        ({"local_threads": 1.5}, "local_threads must be an integer, got 1.5"),
        ({"local_ducks": None}, "local_ducks must be an integer, got None"),
        ({"endpoints": [1]}, "endpoints must be a list of strings"),
        ({"kv_dtype": "bf16"}, "unknown keys .*kv_dtype is set by vLLM's --kv-cache-d"),
        ({"num_drafts": 1}, "unknown keys .*num_drafts is set by .*--speculative-con"),
        ({"figures_file": "/tmp/a"}, "unknown keys .*figures_file is set by vllm_duck"),
        ({"local_weight_format": "int2"}, 'must be "int8" or "int4", got .int2.'),
        ({"mtp_shadow": 1}, "mtp_shadow must be true or false, got 1"),
        ({"tls_cert": "a"}, "tls_cert and tls_key must be both or neither"),
        ([], r"must be a JSON object, got \[\]; \{\} takes every default"),
        (False, "leaving the block out turns duck off"),
    ],
)
def test_wrong_settings_are_refused_with_the_knob(settings, message):
    with pytest.raises(DuckConfigError, match=message):
        DuckConfig.from_settings(settings, {})


def test_a_record_checks_itself_however_it_is_made():
    with pytest.raises(DuckConfigError, match="local_ducks must be an integer"):
        DuckConfig(local_ducks="2")


def test_what_the_processes_hand_over_is_no_setting():
    settings = {field.name for field in fields(DuckConfig)}
    assert settings.isdisjoint(field.name for field in fields(HandOver))
    hand_over = HandOver("bf16", figures_file="/tmp/figures", health_file="/tmp/health")
    config = SimpleNamespace(
        additional_config={
            SETTINGS_KEY: DuckConfig(local_ducks=3).to_settings(),
            HAND_OVER_KEY: asdict(hand_over),
        }
    )
    assert HandOver.of(config) == hand_over
    assert DuckConfig.of(config) == DuckConfig(local_ducks=3)
    assert is_duck_engine(config)
    assert not is_duck_engine(SimpleNamespace(additional_config={"duck": {}}))


def test_no_other_module_names_the_package_s_variables():
    for path in Path(vllm_duck.__file__).parent.rglob("*.py"):
        names = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        found = [name for name in names if re.fullmatch("VLLM_DUCK_[A-Z]+", name)]
        assert not found or path.name == "config.py", (path, found)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("vllm_duck", ("torch", "vllm", "grpc")),
        ("vllm_duck.config", ("torch", "vllm", "grpc", "vllm_duck.executor")),
        ("vllm_duck.families.deepseek_v32", ("torch", "vllm", "vllm_duck.executor")),
        ("vllm_duck.executor.duck", ("torch", "vllm", "grpc", "vllm_duck.models")),
        ("vllm_duck.executor.grpcio.server", ("torch", "vllm", "vllm_duck.models")),
        ("vllm_duck.executor.fleet", ("torch", "vllm", "vllm_duck.models")),
        ("vllm_duck.cli", ("torch", "vllm", "vllm_duck.models")),
        ("vllm_duck.models.cuda.stages", ("torch", "vllm")),
        # Both at once: an interpreter that imports vLLM takes seconds.
        (
            "vllm_duck.models.target, vllm_duck.spec_decode.runner",
            ("vllm_duck.worker", "vllm_duck.hooks"),
        ),
    ],
)
def test_lower_modules_do_not_import_higher_ones(module, forbidden):
    code = (
        f"import sys, {module}\n"
        f"found = [name for name in {forbidden!r} if name in sys.modules]\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    # Without site's entry points: VLLM_PLUGINS empty keeps vLLM from loading duck.
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
