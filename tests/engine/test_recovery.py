"""Ducks that are killed while an engine computes: it goes on with the same tokens."""

import threading

import pytest

from testing.answers import lanes_are, runner_of, start, worker_of
from testing.chaos.rounds import Chaos
from testing.waiting import WAIT_S
from vllm_duck.errors import DuckUnavailable
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
    is_native_and_greedy = transport == "auto" and "seed" not in sampling
    num_in_a_row = 4 if is_native_and_greedy else 1
    # The first ones are prefill; a few in a row are those of layers and of drafts.
    for at in (2, *range(half, half + num_in_a_row)):
        got, _ = _generate_killing(llm, tiny_model, listen, at, transport, **sampling)
        assert got == expected, at


def test_random_faults_change_no_token(llm, tiny_model):
    """`make chaos` for a few rounds, whose faults are always the same."""
    chaos = Chaos(llm, tiny_model, seed=5)
    for _ in chaos.run(lambda num_rounds: num_rounds < 5):
        pass
    assert chaos.counts["wrong"] == 0
    assert chaos.counts["faults"] >= 5


class _Failing:
    """A fleet that has lost a duck for good, from one call on."""

    def __init__(self, fleet, at):
        self._fleet, self._at = fleet, at
        self.num_calls = 0

    def send(self, request):
        self.num_calls += 1
        if self.num_calls > self._at:
            raise DuckUnavailable("duck a:1 has been lost for 60.0 s")
        return self._fleet.send(request)


def _ask(llm, prompts, **sampling):
    from vllm import SamplingParams

    return [
        output.outputs[0]
        for output in llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
            use_tqdm=False,
        )
    ]


@pytest.mark.parametrize("overlaps", [True, False])
def test_no_block_of_a_failed_step_is_ever_a_prefix_hit(llm, overlaps):
    """The same prompts and ones that share their prefix, once the duck is back."""
    runner, fleet = runner_of(llm), worker_of(llm).fleet
    shared = [7 + i % 90 for i in range(150)]
    prompts = [[*shared, 5], [*shared, 6, 8], list(range(20, 70))]
    later = [*prompts, [*shared, 9], [*shared[:100], 11]]
    with lanes_are(overlaps, llm):
        assert llm.reset_prefix_cache()
        expected = [list(each.token_ids) for each in _ask(llm, later, temperature=0.0)]
        counting = _Failing(fleet, 10**9)
        runner.attach_ducks(counting)
        assert llm.reset_prefix_cache()
        _ask(llm, prompts, temperature=0.0)
        num_calls = counting.num_calls
        # In prefill, in a draft behind it, and in decode.
        for at in (0, 1, 3, 5, 7, 8, num_calls // 2, num_calls // 2 + 1, num_calls - 1):
            assert llm.reset_prefix_cache()
            runner.attach_ducks(_Failing(fleet, at))
            failed = _ask(llm, prompts, temperature=0.0)
            assert "error" in {each.finish_reason for each in failed}
            for each, tokens in zip(failed, expected, strict=False):
                # What was told before is right.
                assert list(each.token_ids) == tokens[: len(each.token_ids)]
                if each.finish_reason == "error":
                    assert "duck a:1 has been lost" in each.stop_reason
            runner.attach_ducks(fleet)
            got = [list(each.token_ids) for each in _ask(llm, later, temperature=0.0)]
            assert got == expected, at
    runner.attach_ducks(fleet)


class _Interrupting:
    """A fleet that does something at one call, which is in flight meanwhile."""

    def __init__(self, fleet, at, do):
        self._fleet, self._at, self._do = fleet, at, do
        self.num_calls = 0

    def send(self, request):
        self.num_calls += 1
        pending = self._fleet.send(request)
        if self.num_calls == self._at:
            self._do()
        return pending


# Decodes, and is in the step in which the others are in their prompts.
FIRST, SECOND, THIRD = (
    list(range(10, 40)),
    [7 + i % 90 for i in range(150)],
    [*(7 + i % 90 for i in range(140)), 3],
)


def _run_mixed(llm, at, do):
    """What becomes of the three; `do` runs at a call of the step with all of them."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    engine, fleet = llm.llm_engine, worker_of(llm).fleet
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
    finished = {}

    def step():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0]

    engine.add_request("0", {"prompt_token_ids": FIRST}, sampling)
    for _ in range(3):
        step()
    for i, prompt in enumerate((SECOND, THIRD)):
        engine.add_request(str(i + 1), {"prompt_token_ids": prompt}, sampling)
    runner_of(llm).attach_ducks(_Interrupting(fleet, at, do))
    while engine.has_unfinished_requests():
        step()
    runner_of(llm).attach_ducks(fleet)
    return finished


def _abort(llm, req_id):
    """As a client that disconnects while the engine's process waits for a duck."""
    engine = llm.llm_engine
    ids = engine.output_processor.abort_requests([req_id], internal=False)
    engine.engine_core.engine_core.aborts_queue.put(ids)


def _lose():
    raise DuckUnavailable("duck a:1 has been lost for 60.0 s")


@pytest.fixture(scope="module")
def alone(llm):
    """What each of the three says when nothing happens."""
    assert llm.reset_prefix_cache()
    said = _ask(llm, [FIRST, SECOND, THIRD], temperature=0.0)
    return [list(each.token_ids) for each in said]


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("at", [1, 3])
def test_a_failed_step_ends_what_decodes_and_what_is_in_its_prompt(
    llm, alone, overlaps, at
):
    with lanes_are(overlaps, llm):
        finished = _run_mixed(llm, at, _lose)
        assert {each.finish_reason for each in finished.values()} == {"error"}
        assert len(finished) == 3
        said = list(finished["0"].token_ids)
        assert said
        assert said == alone[0][: len(said)]
        again = _ask(llm, [FIRST, SECOND, THIRD], temperature=0.0)
    assert [list(each.token_ids) for each in again] == alone


@pytest.mark.parametrize("aborted", ["0", "1"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_request_aborted_while_its_step_waits_leaves_no_block_behind(
    llm, alone, aborted, fails
):
    """In its prompt or decoding, in a step that fails or that recovers."""

    def abort():
        _abort(llm, aborted)
        if fails:
            _lose()

    finished = _run_mixed(llm, 2, abort)
    others = {"0", "1", "2"} - {aborted}
    for req_id in others:
        each = finished[req_id]
        if fails:
            assert each.finish_reason == "error"
        else:
            assert list(each.token_ids) == alone[int(req_id)]
    again = _ask(llm, [THIRD, SECOND, FIRST], temperature=0.0)
    assert [list(each.token_ids) for each in again] == alone[::-1]
