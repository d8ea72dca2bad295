"""Prints how many pages a call takes from the system, at host and duck together.

Run by test_memory.py, with malloc told to give all large memory back to the system.

    python -m tests.executor.native.page_faults
"""

import resource

from testing.ducks.mini_model import make_request
from testing.ducks.wire_peers import calling, serving

NUM_CALLS = 20


def main() -> None:
    # Many rows go through the duck's second thread.
    request = make_request(1024, hidden_size=256)
    with (
        serving("native") as server,
        calling("native", [server.endpoint]) as fan_out,
    ):
        # The sum of one call is still held during the next one.
        for _ in range(3):
            held = fan_out.send(request).wait()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(NUM_CALLS):
            held = fan_out.send(request).wait()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert held.total.shape == request.hidden.shape
    print((after - before) // NUM_CALLS)


if __name__ == "__main__":
    main()
