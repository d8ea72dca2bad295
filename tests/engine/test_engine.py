"""One engine, end to end: the same tokens however the work is cut up.

The engine runs in this process, so that its scheduler and its ducks can be changed
between requests without a restart.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from testing.answers import (
    lanes_are,
    recording_loads,
    runner_of,
    scheduler_of,
    start,
    worker_of,
)
from testing.engines import in_fresh_process, start_engine
from testing.oracle import transformers_logits
from testing.texts import teacher_forced_texts
from vllm_duck.errors import DuckCheckpointError, DuckUnavailable
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.models.loader import load_views

pytestmark = pytest.mark.vllm

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def loaded_names() -> list[str]:
    """The tensors that the host loads, filled in when the engine starts."""
    return []


@pytest.fixture(scope="module")
def llm(engines, tiny_model, loaded_names):
    with recording_loads(loaded_names):
        return start(tiny_model, speculates=False)


@pytest.fixture(scope="module")
def prompts(tiny_model) -> list[list[int]]:
    """Short, around index_topk, and ten times longer; each asks for an answer."""
    texts = teacher_forced_texts(tiny_model, 2000)
    turns = [prompt for kind in texts.values() for prompt in kind]
    asked = [_cut_behind_a_question(turn) for turn in turns]
    short = sorted(asked, key=len)
    return [short[0], short[len(short) // 4], short[len(short) // 2], *short[-4:]]


def _cut_behind_a_question(turn: list[int]) -> list[int]:
    """The ids up to the last reply's start; whole where no question is in it."""
    assistant = 4
    starts = [at for at, token in enumerate(turn) if token == assistant]
    # Behind <|Assistant|> comes </think>, then the reply.
    return turn[: starts[-1] + 2] if starts else turn[:-1]


@pytest.fixture(scope="module")
def expected(llm, prompts) -> list[list[int]]:
    """Each prompt alone, in one chunk, on a cold cache."""
    return [generate(llm, [prompt], cold=True)[0] for prompt in prompts]


def generate(llm, prompts, *, cold=False, num_tokens=NUM_TOKENS, **sampling):
    from vllm import SamplingParams

    if cold:
        assert llm.reset_prefix_cache()
    settings = {"temperature": 0.0, **sampling}
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        SamplingParams(max_tokens=num_tokens, **settings),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def model_of(llm):
    return runner_of(llm).model


def test_vllm_allocates_the_caches_in_the_official_sizes(llm):
    config = worker_of(llm).vllm_config
    layers = config.compilation_config.static_forward_context
    (group,) = scheduler_of(llm).kv_cache_config.kv_cache_groups
    sizes = {name: layers[name].kv_cache.shape[-1] for name in group.layer_names}
    num_layers = model_of(llm).dims.num_hidden_layers
    assert sorted(sizes.values()) == [132] * num_layers + [656] * num_layers
    num_blocks = {layers[name].kv_cache.shape[0] for name in group.layer_names}
    token_bytes = num_layers * (132 + 656)
    block_bytes = config.cache_config.block_size * token_bytes
    assert num_blocks == {config.cache_config.kv_cache_memory_bytes // block_bytes}


@pytest.mark.parametrize("chunk", [17, 48, 300])
def test_chunked_prefill_gives_the_same_tokens(llm, prompts, expected, chunk):
    config = scheduler_of(llm).scheduler_config
    assert config.long_prefill_token_threshold == 0
    config.long_prefill_token_threshold = chunk
    try:
        assert generate(llm, prompts[-3:], cold=True) == expected[-3:]
    finally:
        config.long_prefill_token_threshold = 0


def test_a_prefix_hit_gives_the_same_tokens(llm, prompts, expected):
    generate(llm, prompts, cold=True)
    stats = scheduler_of(llm).kv_cache_manager
    assert generate(llm, prompts) == expected
    long = prompts[-1]
    # A prompt that shares only its first half with what is cached.
    forked = long[:320] + prompts[-2][:200]
    cold = generate(llm, [forked], cold=True)
    generate(llm, [long])
    assert generate(llm, [forked]) == cold
    assert stats.enable_caching


def test_company_in_the_batch_changes_nothing(llm, prompts, expected):
    assert generate(llm, prompts, cold=True) == expected
    shuffled = [5, 0, 3, 6, 1, 4, 2]
    got = generate(llm, [prompts[i] for i in shuffled], cold=True)
    assert got == [expected[i] for i in shuffled]


def test_seeded_sampling_repeats(llm, prompts):
    sampling = {"temperature": 1.0, "seed": 5}
    first = generate(llm, prompts[:3], **sampling)
    assert generate(llm, prompts[:3], **sampling) == first
    assert generate(llm, prompts[:3], temperature=1.0, seed=6) != first


def test_greedy_tokens_are_those_of_transformers_up_to_near_ties(
    tiny_model, prompts, expected
):
    """Against fp32 with exact caches; ours are e4m3, a relative error of 2**-4.

    In a process of its own: an engine's settings would round transformers' GEMMs too.
    """
    # The longest two take transformers as long as all others together.
    asked = list(zip(prompts, expected, strict=True))[:-2]
    texts = [prompt + tokens for prompt, tokens in asked]
    exact, _ = in_fresh_process(transformers_logits, tiny_model, texts)
    gaps = []
    for (prompt, tokens), logits in zip(asked, exact, strict=True):
        rows = logits[len(prompt) - 1 : -1]
        gaps.extend(rows.max(-1) - rows[range(len(tokens)), tokens])
    others = [gap for gap in gaps if gap > 0]
    assert len(others) <= 0.06 * len(gaps), others
    assert sum(others) <= 1.0 * len(others), others


def _with_ducks(llm, model_dir, num_ducks, run, plan=None):
    """Run with other ducks in place of the engine's own."""
    worker = worker_of(llm)
    with (
        LocalDucks.start(model_dir, num_ducks=num_ducks, num_threads=1, plan=plan) as d,
        Fleet.connect(d.endpoints, expect=Checkpoint(model_dir).summary) as fleet,
    ):
        model_of(llm).attach_ducks(fleet)
        try:
            return run()
        finally:
            model_of(llm).attach_ducks(worker.fleet)


@pytest.mark.parametrize("num_ducks", [1, 3, 5])
def test_any_number_of_ducks_gives_the_same_text(
    llm, tiny_model, prompts, expected, num_ducks
):
    """Partial sums round differently for another split, so a near-tie may turn over.

    The rounding of one value moves a logit by hundredths; a turned expert or position
    at a near-tie of its own moves it by tenths.
    """
    got = _with_ducks(
        llm, tiny_model, num_ducks, lambda: generate(llm, prompts, cold=True)
    )
    for prompt, ours, other in zip(prompts, expected, got, strict=True):
        if ours != other:
            at = next(i for i in range(NUM_TOKENS) if ours[i] != other[i])
            gap = _gap_of(llm, prompt + ours[:at], ours[at], other[at])
            assert gap < 0.75, f"{num_ducks} ducks: token {at} differs by {gap}"


def _gap_of(llm, prompt, token, other):
    """How far apart the engine sees two next tokens, in log probability."""
    from vllm import SamplingParams

    (output,) = llm.generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=20),
        use_tqdm=False,
    )
    found = output.outputs[0].logprobs[0]
    return abs(found[token].logprob - found[other].logprob)


def _poisoned_copy(model_dir, out_dir, is_kept):
    """A copy of the checkpoint whose other tensors are NaN."""
    shutil.copytree(model_dir, out_dir)
    for path in Path(out_dir).glob("*.safetensors"):
        tensors = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if not is_kept(name):
                    tensor = torch.full(tensor.shape, float("nan")).to(tensor.dtype)
                tensors[name] = tensor
        path.chmod(0o644)
        save_file(tensors, path, metadata={"format": "pt"})
    return out_dir


def test_host_and_ducks_read_only_what_they_own(
    llm, tiny_model, prompts, expected, tmp_path
):
    def is_expert(name):
        return ".mlp.experts." in name

    ducks_dir = _poisoned_copy(tiny_model, tmp_path / "ducks", is_expert)
    host_dir = _poisoned_copy(tiny_model, tmp_path / "host", lambda n: not is_expert(n))
    got = _with_ducks(llm, ducks_dir, 2, lambda: generate(llm, prompts, cold=True))
    assert got == expected
    views = {
        name: torch.empty(_shape_of(host_dir, name), dtype=torch.float32)
        for name in _host_tensor_names(host_dir)
    }
    load_views(host_dir, views)
    assert all(not view.isnan().any() for view in views.values())


def _host_tensor_names(model_dir):
    num_layers = json.loads((model_dir / "config.json").read_text())[
        "num_hidden_layers"
    ]
    for name in sorted(Checkpoint(model_dir).tensor_names):
        is_mtp = name.startswith(f"model.layers.{num_layers}.")
        if not is_mtp and ".experts." not in name and not name.endswith("_scale_inv"):
            yield name


def _shape_of(model_dir, name):
    return Checkpoint(model_dir).place_of(name).shape


def test_host_loads_no_routed_expert(llm, tiny_model, loaded_names):
    assert not [name for name in loaded_names if ".experts." in name]
    assert sorted(loaded_names) == sorted(_host_tensor_names(tiny_model))


@pytest.mark.parametrize("overlaps", [False, True])
def test_figures_count_calls_and_memory(llm, prompts, overlaps):
    (before,) = llm.collective_rpc("duck_figures")
    with lanes_are(overlaps, llm):
        generate(llm, prompts[:1], cold=True, num_tokens=4)
    (after,) = llm.collective_rpc("duck_figures")
    dims = model_of(llm).dims
    num_moe_layers = dims.num_hidden_layers - dims.num_leading_dense
    # The prompt goes in two lanes or whole, then each token alone.
    num_calls = ((2 if overlaps else 1) + 3) * num_moe_layers
    for old, new in zip(before["ducks"], after["ducks"], strict=True):
        assert new["num_calls"] - old["num_calls"] == num_calls
        assert new["rtt_us"] >= new["compute_us"]
        assert new["resident_bytes"] > 0
    assert after["host_bytes"] > 0


def test_an_endpoint_that_is_no_duck_is_refused_before_weights_load(
    engines, tiny_model, monkeypatch
):
    duck = {"endpoints": ["unix:/nonexistent/duck"], "deadline_s": 1.0}
    loaded = []
    monkeypatch.setattr(
        "vllm_duck.models.loader.load_views", lambda *args: loaded.append(args)
    )
    with pytest.raises(DuckUnavailable, match="unix:/nonexistent/duck"):
        start_engine(tiny_model, duck=duck)
    assert not loaded


def test_a_missing_host_tensor_is_named(tiny_model, tmp_path):
    with pytest.raises(
        DuckCheckpointError, match=r"model\.layers\.9\.mlp\.gate\.weight"
    ):
        load_views(tiny_model, {"model.layers.9.mlp.gate.weight": torch.empty(1)})
