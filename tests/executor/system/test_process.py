"""What a process changes for its threads and children, and what it leaves alone."""

import os
import threading

from vllm_duck.executor.grpcio.client import GrpcDuck
from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus, thread_cpus
from vllm_duck.executor.system.process import reset_memory_policy, resident_bytes


def _in_pinned_thread(function):
    """Run as vLLM's worker would: with the thread pinned to one cpu."""
    result = []

    def run():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        result.append(function())
        result.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result


def _affinity(thread_id):
    try:
        return os.sched_getaffinity(int(thread_id))
    except ProcessLookupError:
        return None


def test_a_pinned_thread_finds_all_cpus_and_stays_pinned():
    found, afterwards = _in_pinned_thread(allowed_cpus)
    assert found == thread_cpus()
    assert len(afterwards) == 1


def test_a_function_runs_on_the_cpus_it_is_given():
    one = {max(thread_cpus())}
    assert run_on_cpus(thread_cpus, one) == one


def test_no_thread_of_a_client_inherits_the_callers_pin():
    known = set(os.listdir("/proc/self/task"))

    def open_duck():
        duck = GrpcDuck("127.0.0.1:1")
        fresh = set(os.listdir("/proc/self/task")) - known
        # This thread itself is the pinned one.
        fresh.discard(str(threading.get_native_id()))
        affinities = [_affinity(thread_id) for thread_id in fresh]
        duck.close()
        return affinities

    affinities, pinned = _in_pinned_thread(open_duck)
    assert len(pinned) == 1
    assert all(affinity in (None, thread_cpus()) for affinity in affinities)


def test_resident_bytes_of_this_process_and_of_nobody():
    assert resident_bytes() > 2**20
    assert resident_bytes("nobody") == 0


def test_resetting_the_memory_policy_does_not_fail():
    reset_memory_policy()
