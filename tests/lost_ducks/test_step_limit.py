"""The wait for lost ducks ends before vLLM gives its worker up."""

import pytest
from vllm import envs

from vllm_duck.config import DuckConfig
from vllm_duck.errors import DuckConfigError
from vllm_duck.lost_ducks.step_limit import check_step_limit, step_wait_s

TIMEOUT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"


def _config(**settings):
    return DuckConfig.from_settings({"endpoints": ["a:1"], **settings}, {})


def test_the_defaults_leave_the_step_a_whole_deadline():
    config = _config()
    check_step_limit(config)
    limit_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    assert step_wait_s(config) + config.deadline_s < limit_s
    assert config.recover_s <= step_wait_s(config)


def test_too_long_together_is_refused_with_both_values_and_the_knob(monkeypatch):
    monkeypatch.setenv(TIMEOUT, "130")
    check_step_limit(_config())
    monkeypatch.setenv(TIMEOUT, "129")
    match = rf"{TIMEOUT}=129, .*, got 60 \+ 60; raise that .*\[\"recover_s\"\]"
    with pytest.raises(DuckConfigError, match=match):
        check_step_limit(_config())


def test_without_recovery_nothing_is_refused():
    check_step_limit(_config(deadline_s=3000, recover_s=0))
