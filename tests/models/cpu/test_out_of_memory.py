"""Scratch that cannot be had is a MemoryError of that call, in whichever thread."""

from testing.memory.failing import run_module


def test_a_call_without_memory_raises_and_the_next_one_is_right(failing_memory):
    printed = run_module("tests.models.cpu.starved_host", library=failing_memory)
    failed = dict(line.split() for line in printed.splitlines() if " " in line)
    # The copy of the rows and then the caller's share; a share of another thread.
    assert int(failed["main"]) >= 2
    assert int(failed["others"]) >= 1
