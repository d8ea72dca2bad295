"""What `{"method": "duck_mtp1"}` becomes, and which settings it refuses."""

import pytest

from vllm_duck.errors import DuckConfigError
from vllm_duck.spec_decode import method


def test_the_method_alone_sets_all_that_it_needs():
    settings = method.vllm_settings({"method": "duck_mtp1"})
    assert settings == {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "disable_padded_drafter_batch": True,
        "draft_sample_method": "probabilistic",
    }
    assert method.is_rewritten(settings)
    assert method.is_rewritten({**settings, "target_model_config": object()})


def test_only_its_own_name_is_the_method():
    assert method.is_duck_method({"method": "duck_mtp1"})
    assert not method.is_duck_method({"method": "mtp"})
    assert not method.is_duck_method(None)
    assert not method.is_rewritten({"method": "mtp", "num_speculative_tokens": 1})


def test_what_it_sets_itself_may_be_spelled_out():
    settings = {"method": "duck_mtp1", "num-speculative-tokens": 1}
    assert method.vllm_settings(settings) == method.vllm_settings(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 2}, "num_speculative_tokens to be 1, got 2"),
        ({"model": "some/draft"}, "takes no model, got 'some/draft'"),
        (
            {"disable_padded_drafter_batch": False},
            "disable_padded_drafter_batch to be True, got False",
        ),
        ({"draft_sample_method": "greedy"}, "to be 'probabilistic', got 'greedy'"),
        ({"max_model_len": 64}, "takes no max_model_len, got 64"),
        ({"rejection_sample_method": "synthetic"}, "takes no rejection_sample_method"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(changes, message):
    with pytest.raises(DuckConfigError, match=message):
        method.vllm_settings({"method": "duck_mtp1", **changes})
