"""`vllm serve --speculative-config '{"method": "duck_mtp1"}'` by the OpenAI client."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from openai import OpenAI

from examples import tool_call
from testing.tool_calls import CALL, CHAT_FLAGS, call_at_once, call_in_pieces
from testing.vllm_server import Server, running_server
from testing.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.vllm

PROMPT = "Is 91 prime?\n"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    flags = (
        *("--speculative-config", '{"method": "duck_mtp1"}'),
        *("--per-request-spec-decode-metrics", "summary"),
        # Whether a draft is worth its time depends on the machine.
        *("--additional-config", '{"duck": {"draft_gate": false}}'),
        *CHAT_FLAGS,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOG_STATS_INTERVAL", "1")
        with running_server(tiny_model, log, *flags) as running:
            yield running


@pytest.fixture
def complete(server):
    client = OpenAI(base_url=f"{server.base_url}/v1", api_key="none")

    def ask(**request):
        defaults = {"prompt": PROMPT, "max_tokens": 21, "temperature": 0}
        return client.completions.create(model="tiny", **{**defaults, **request})

    return ask


def test_usage_counts_every_token_of_a_stream(complete):
    whole = complete()
    events = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].text for e in events if e.choices) == (
        whole.choices[0].text
    )
    assert events[-1].usage.completion_tokens == 21 == whole.usage.completion_tokens


def test_echo_repeats_the_prompt_with_its_logprobs(complete):
    plain = complete(logprobs=1)
    echoed = complete(echo=True, logprobs=1)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    rest = len(plain.choices[0].logprobs.tokens)
    logprobs = echoed.choices[0].logprobs.token_logprobs
    assert logprobs[-rest:] == plain.choices[0].logprobs.token_logprobs


@pytest.mark.parametrize(
    "option", [{"logit_bias": {"50": 100}}, {"extra_body": {"min_p": 0.2}}], ids=str
)
def test_options_that_vllm_refuses_under_speculation_are_served(complete, option):
    assert complete(temperature=1.0, **option).choices[0].text


def test_a_tool_call_is_the_one_of_plain_decoding(server):
    """`tests/engine/test_serve.py` has the same call without drafts."""
    client = OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    assert call_at_once(client) == call_in_pieces(client) == CALL


def test_the_example_of_a_tool_call_runs(server):
    command = [sys.executable, tool_call.__file__, "--url", f"{server.base_url}/v1"]
    done = subprocess.run([*command, "--force"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "call: sort_digits(" in done.stdout
    assert "\nanswer: " in done.stdout


def _metric(server, name):
    with urllib.request.urlopen(f"{server.base_url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_time_per_output_token_counts_tokens_where_inter_token_latency_does_not(
    server, complete
):
    """Which metric docs/speculation.md says to watch."""
    per_token = "vllm:request_time_per_output_token_seconds"
    gaps = "vllm:inter_token_latency_seconds_count"
    decode = "vllm:request_decode_time_seconds_sum"
    names = (f"{per_token}_count", f"{per_token}_sum", decode, gaps)
    before = [_metric(server, name) for name in names]
    complete(max_tokens=41, extra_body={"ignore_eos": True})
    wait_until(lambda: _metric(server, names[0]) > before[0])
    after = [_metric(server, name) for name in names]
    requests, token_s, decode_s, num_gaps = (
        new - old for old, new in zip(before, after, strict=True)
    )
    assert requests == 1
    assert token_s == pytest.approx(decode_s / 40)
    assert num_gaps < 40


def test_the_metrics_count_drafts(server, complete):
    complete()

    def values_of(prefix):
        with urllib.request.urlopen(
            f"{server.base_url}/metrics", timeout=WAIT_S
        ) as got:
            lines = got.read().decode().splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(prefix)]

    for name in ("num_draft_tokens", "num_accepted_tokens_per_pos"):
        (value,) = values_of(f"vllm:spec_decode_{name}_total")
        assert value > 0
    # The worker hands its figures over twice a second. The first steps try lanes.
    wait_until(lambda: values_of("vllm_duck:overlapped_steps_total") > [0])
    assert len(values_of("vllm_duck:duck_calls_total")) == 2


def test_the_log_has_the_lines_of_duck(server, complete):
    complete()
    text = server.log.read_text()
    assert "starting 2 local ducks" in text
    assert "2 ducks are up, called over" in text


def test_the_api_server_logs_what_lanes_bring(server, complete):
    def is_logged():
        complete()
        return "olap pair=" in server.log.read_text()

    wait_until(is_logged)


def test_a_request_s_own_acceptance_comes_with_its_answer(complete):
    metrics = complete().model_dump()["metrics"]["speculative_decoding"]
    assert 0 < metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]


@pytest.mark.last
def test_sigterm_ends_the_server_in_order_during_load(server, complete):
    streams = [
        complete(stream=True, max_tokens=900, extra_body={"ignore_eos": True})
        for _ in range(4)
    ]
    for events in streams:
        next(iter(events))
    server.process.terminate()
    for events in streams:
        assert [e.choices[0].finish_reason for e in events][-1] == "abort"
    assert server.process.wait(WAIT_S) == 0
    server.assert_calm()
