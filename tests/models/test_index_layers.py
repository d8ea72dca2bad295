"""Which layers have an indexer: three spellings, which may not disagree."""

from types import SimpleNamespace

import pytest

from vllm_duck.errors import DuckConfigError
from vllm_duck.models.index_layers import read_index_layers

KINDS = ["full", "full", "full", "shared", "shared", "full"]


def read(num_layers=6, num_mtp=1, **config):
    return read_index_layers(SimpleNamespace(**config), num_layers, num_mtp)


def test_without_a_word_of_it_every_layer_has_one():
    assert read() == (0, 1, 2, 3, 4, 5, 6)
    assert read(index_topk_freq=1, indexer_types=None) == (0, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "config",
    [
        {"indexer_types": KINDS},
        {"index_topk_pattern": "FFFSSF"},
        {"index_topk_pattern": list("FFFSSF")},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"indexer_types": KINDS, "index_topk_pattern": "FFFSSF"},
        {
            "indexer_types": KINDS,
            "index_topk_freq": 3,
            "index_skip_topk_offset": 3,
            "index_topk_pattern": None,
        },
    ],
    ids=str,
)
def test_each_spelling_and_those_that_agree_are_read(config):
    assert read(**config) == (0, 1, 2, 5, 6)
    assert read(num_mtp=0, **config) == (0, 1, 2, 5)


def test_the_schedule_of_glm_5_2_has_21_full_layers():
    found = read(78, index_topk_freq=4, index_skip_topk_offset=3)
    assert found == (0, 1, *range(2, 78, 4), 78)
    assert len(found) == 22


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"indexer_types": KINDS, "index_topk_freq": 4, "index_skip_topk_offset": 3},
            "index_topk_freq must be what indexer_types says, ",
        ),
        (
            {"indexer_types": KINDS, "index_topk_pattern": "FFFFSF"},
            "index_topk_pattern must be what indexer_types says, ",
        ),
        ({"indexer_types": ["shared", *KINDS[1:]]}, "must be full for the first layer"),
        ({"indexer_types": KINDS[1:]}, "indexer_types must be of 6 layers, got '5'"),
        ({"indexer_types": ["full"] * 5 + ["half"]}, "a list of 'full' and 'shared'"),
        ({"indexer_types": "full"}, "a list of 'full' and 'shared', got 'full'"),
        ({"index_topk_pattern": "FFXSSF"}, "must be F and S for the layers"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern must be of 6 layers"),
        ({"index_topk_freq": 0}, "index_topk_freq must be an integer >= 1, got 0"),
    ],
    ids=str,
)
def test_what_says_something_else_is_refused(config, message):
    with pytest.raises(DuckConfigError, match=message):
        read(**config)
