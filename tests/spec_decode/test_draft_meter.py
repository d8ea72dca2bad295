"""Drafts are counted by depth; what is written is read again."""

import json

import pytest

from vllm_duck.spec_decode.draft_meter import DraftMeter, DraftSums


def make_meter():
    meter = DraftMeter(3)
    # Two requests of a step, then one with fewer drafts.
    meter.add_verified(3, 3)
    meter.add_verified(3, 1)
    meter.add_verified(1, 0)
    meter.add_step(1.0, [(2, 0.2), (2, 0.1)])
    meter.add_step(1.0, [(0, 0.1)])
    return meter


def test_drafts_are_counted_by_depth():
    total = make_meter().total
    assert total.scheduled == (3, 2, 2)
    assert total.accepted == (2, 1, 1)
    assert total.chances == pytest.approx([2 / 3, 1 / 2, 1 / 2])


def test_the_share_of_the_mtp_layer_is_of_the_whole_step():
    total = make_meter().total
    assert total.mtp_s == pytest.approx((0.3, 0.1, 0.0))
    assert total.mtp_share == pytest.approx(0.4 / 2.4)
    assert DraftSums.nothing(3).mtp_share == 0


def test_sums_are_read_as_they_were_written():
    total = make_meter().total
    assert DraftSums.from_figures(json.loads(json.dumps(total.figures()))) == total


def test_differences_are_of_all_sums():
    meter = make_meter()
    before = meter.total
    meter.add_verified(1, 1)
    meter.add_step(0.5, [(1, 0.25)])
    latest = meter.total - before
    assert latest.scheduled == (1, 0, 0)
    assert latest.chances == [1.0]
    assert latest.mtp_share == pytest.approx(1 / 3)
