"""What `duck_mtp1` becomes, in which forms it may be asked for, what it refuses."""

from types import SimpleNamespace

import pytest

from vllm_duck.errors import DuckConfigError
from vllm_duck.spec_decode import method

FOR_VLLM = {
    "method": "mtp",
    "num_speculative_tokens": 1,
    "disable_padded_drafter_batch": True,
    "draft_sample_method": "probabilistic",
}


def make_args(settings=None, **short_forms):
    empty = dict.fromkeys(("spec_method", "spec_model", "spec_tokens"))
    return SimpleNamespace(speculative_config=settings, **{**empty, **short_forms})


def vllm_settings(*args, is_shadow=False, **short_forms):
    return method.vllm_settings(make_args(*args, **short_forms), is_shadow=is_shadow)


@pytest.mark.parametrize(
    "args",
    [
        make_args({"method": "duck_mtp1"}),
        make_args({"method": "duck_mtp1", "num-speculative-tokens": 1}),
        make_args({"method": "duck_mtp1"}, spec_tokens=1),
        make_args(spec_method="duck_mtp1"),
        make_args(spec_method="duck_mtp1", spec_tokens=1),
        make_args({"num_speculative_tokens": 1}, spec_method="duck_mtp1"),
        make_args({"method": "duck_mtp"}),
        make_args(spec_method="duck_mtp", spec_tokens=1),
    ],
)
def test_every_form_sets_all_that_the_method_needs(args):
    assert method.is_asked_for(args)
    assert method.vllm_settings(args, is_shadow=False) == FOR_VLLM


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
def test_duck_mtp_takes_the_number_of_drafts(num_drafts):
    settings = {"method": "duck_mtp", "num_speculative_tokens": num_drafts}
    expected = {**FOR_VLLM, "num_speculative_tokens": num_drafts}
    assert vllm_settings(settings) == expected


@pytest.mark.parametrize("num_drafts", [0, 8, 2.0, "3", True, None])
def test_other_numbers_of_drafts_are_refused(num_drafts):
    settings = {"method": "duck_mtp", "num_speculative_tokens": num_drafts}
    with pytest.raises(DuckConfigError, match="to be 1 to 7, got "):
        vllm_settings(settings)


def test_shadow_mode_needs_the_same_without_the_method():
    assert vllm_settings(is_shadow=True) == FOR_VLLM
    assert vllm_settings() is None


def test_only_its_own_name_is_the_method():
    assert not method.is_asked_for(make_args())
    assert not method.is_asked_for(make_args({"method": "mtp"}))
    assert not method.is_asked_for(make_args(spec_method="mtp"))


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
        vllm_settings({"method": "duck_mtp1", **changes})


@pytest.mark.parametrize(
    ("short_forms", "message"),
    [
        ({"spec_tokens": 2}, "num_speculative_tokens to be 1, got 2"),
        ({"spec_model": "some/draft"}, "takes no model, got 'some/draft'"),
        ({"spec_method": "mtp"}, "--spec-method must be absent where .* 'method'"),
    ],
)
def test_short_forms_contradict_as_the_long_ones_do(short_forms, message):
    with pytest.raises(DuckConfigError, match=message):
        vllm_settings({"method": "duck_mtp1"}, **short_forms)


@pytest.mark.parametrize(
    "args", [make_args({"method": "ngram"}), make_args(spec_tokens=1)]
)
def test_another_method_is_refused(args):
    with pytest.raises(
        DuckConfigError, match="to name the method duck_mtp or duck_mtp1, got {"
    ):
        method.vllm_settings(args, is_shadow=False)
