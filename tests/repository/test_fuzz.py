"""`python -m testing.fuzz` in short, and every input that it found a fault with."""

import pytest

from testing.fuzz.__main__ import fuzz, kept, try_case
from testing.fuzz.targets import all_targets

NUM_CASES = 300


@pytest.fixture(scope="module")
def targets():
    with all_targets() as found:
        yield {target.name: target for target in found}


def test_former_findings_are_refused(targets):
    cases = kept()
    assert cases
    for name, inputs in cases.items():
        for case in inputs:
            assert not try_case(targets[name], case), (name, case)


def test_damaged_input_is_refused_or_taken(targets):
    for target in targets.values():
        if target.share > 2_000:
            assert not fuzz(target, NUM_CASES, seed=1), target.name
