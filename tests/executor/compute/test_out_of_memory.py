"""A duck that finds no memory for a request answers with a status, and lives."""

import re

import pytest

from testing.ducks.wire_peers import needs_native
from testing.memory.failing import ALL, run_module

pytestmark = needs_native

# Few rows are computed by the thread that reads them, more by a second one. Messages of
# yet more rows would be in memory that an earlier call has left (csrc/base/block.h).
NUM_ROWS = [40, 700]


def answers_of(num_rows, least_bytes, count, library):
    arguments = [str(n) for n in (num_rows, least_bytes, count)]
    printed = run_module(
        "tests.executor.compute.starved_duck", *arguments, library=library
    )
    return printed.splitlines()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_large_allocation_that_fails_is_a_status(failing_memory, num_rows):
    """Those of the request, the reply, and the kernel's buffers.

    A request that finds no memory is sent again, on a connection that may find none.
    """
    answers = answers_of(num_rows, 32 * num_rows, ALL, failing_memory)
    of_request, *others = answers
    assert re.search("the duck has no memory for |UNAVAILABLE", of_request)
    assert len(others) >= 4
    assert all("the duck has no memory for " in each for each in others), others


@pytest.mark.parametrize("count", [1, ALL], ids=["one", "all"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_whatever_allocation_fails_the_duck_lives(failing_memory, num_rows, count):
    """The host is told, or its connection is lost and it asks again."""
    assert len(answers_of(num_rows, 1, count, failing_memory)) >= 10
