"""`vllm serve --speculative-config '{"method": "duck_mtp1"}'` by the OpenAI client."""

import urllib.request
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.vllm_server import Server, running_server
from tests.waiting import WAIT_S, wait_until

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
