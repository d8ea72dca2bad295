"""Ducks that are killed while an engine computes: it goes on with the same tokens."""

import threading

import pytest

from testing.answers import runner_of, start, worker_of
from testing.waiting import WAIT_S
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks

pytestmark = pytest.mark.vllm

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def llm(engines, tiny_model):
    return start(tiny_model, speculates=True)


@pytest.fixture
def listen(tmp_path):
    return [f"unix:{tmp_path}/{i}" for i in range(2)]


class _Killing:
    """A fleet whose ducks are killed at one call, which is then in flight."""

    def __init__(self, fleet, ducks, restart, at):
        self._fleet, self._ducks, self._at = fleet, ducks, at
        self._restart = restart
        self.num_calls = 0
        self.later = None

    def send(self, request):
        self.num_calls += 1
        if self.num_calls == self._at:
            for child in self._ducks._children:
                child.process.kill()
            self.later = threading.Thread(target=self._restart)
            self.later.start()
        return self._fleet.send(request)


def _generate(llm, **sampling):
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    prompts = [list(range(10, 10 + 3 * i)) for i in (5, 9, 30)]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def _generate_killing(llm, tiny_model, listen, at, transport, **sampling):
    """The tokens with all ducks killed at the call `at`, and the number of calls."""
    running = [LocalDucks.start(tiny_model, num_threads=1, listen=listen)]

    def restart():
        running.append(LocalDucks.start(tiny_model, num_threads=1, listen=listen))

    try:
        with Fleet.connect(listen, recover_s=WAIT_S, transport=transport) as fleet:
            ducks = _Killing(fleet, running[0], restart, at)
            runner_of(llm).attach_ducks(ducks)
            tokens = _generate(llm, **sampling)
            if ducks.later is not None:
                ducks.later.join()
            return tokens, ducks.num_calls
    finally:
        runner_of(llm).attach_ducks(worker_of(llm).fleet)
        for each in running:
            each.stop()


@pytest.mark.parametrize("transport", ["auto", "grpcio"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=str
)
def test_ducks_killed_in_prefill_decode_and_draft_change_no_token(
    llm, tiny_model, listen, sampling, transport
):
    expected, num_calls = _generate_killing(
        llm, tiny_model, listen, None, transport, **sampling
    )
    half = num_calls // 2
    num_in_a_row = 4 if transport == "auto" else 1
    # The first ones are prefill; a few in a row are those of layers and of drafts.
    for at in (2, *range(half, half + num_in_a_row)):
        got, _ = _generate_killing(llm, tiny_model, listen, at, transport, **sampling)
        assert got == expected, at
