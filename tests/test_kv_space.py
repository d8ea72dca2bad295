"""The KV caches' default size: what requests could use, within what memory allows."""

import os
from dataclasses import replace

import pytest
from vllm.utils import cpu_resource_utils

from testing.engine_args import make_args
from vllm_duck import engine_environ, hooks, kv_space
from vllm_duck.engine_environ import RUNNER_VARIABLE
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.system import cgroup_memory
from vllm_duck.executor.system.cgroup_memory import page_cache_bytes
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import shard_bytes
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.kv_space import (
    _PROCESS_BYTES,
    Demand,
    Memory,
    choose,
    duck_weight_bytes,
    host_weight_bytes,
)

GB = 10**9
CHOSEN = (RUNNER_VARIABLE, engine_environ.STOP_VARIABLE)
# DeepSeek-V3.2 with its MTP layer: 62 layers of 788 bytes a token.
V32 = Demand(num_requests=256, request_len=131_073, block_len=128, token_bytes=48_856)
MEMORY = Memory(node=256 * GB, total=256 * GB, host_weights=40 * GB, duck_weights=0)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("VLLM_DUCK_ENDPOINTS", "VLLM_CPU_KVCACHE_SPACE", *CHOSEN):
        # Set first: then it is put back even if it was not there.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(engine_environ, "_chosen", set())


def test_a_share_of_what_the_weights_leave_bounds_it():
    num_bytes = choose(MEMORY, V32)
    assert 0 <= 0.8 * (216 - 1.2) * GB - num_bytes < V32.block_bytes
    assert num_bytes % V32.block_bytes == 0


def test_no_more_is_taken_than_the_requests_could_use():
    few = replace(V32, num_requests=3)
    assert choose(MEMORY, few) == (3 * 1025 + 1) * few.block_bytes


def test_local_ducks_take_from_all_nodes_and_the_host_from_its_own():
    with_ducks = replace(MEMORY, total=512 * GB, duck_weights=330 * GB)
    # Half of their 330 are on the host's node, one of two.
    assert with_ducks.left == 256 * GB - 40 * GB - 165 * GB - _PROCESS_BYTES
    assert replace(with_ducks, duck_weights=0).left == 216 * GB - _PROCESS_BYTES
    # A container: its limit is nearer than the node's end.
    contained = replace(with_ducks, total=400 * GB, duck_weights=340 * GB)
    assert contained.left == 256 * GB - 40 * GB - 340 * GB * 256 // 400 - _PROCESS_BYTES


def test_less_than_one_request_s_cache_is_refused_with_the_numbers():
    match = (
        r"one request of 131,073 tokens needs 6\.4 GB of KV cache, and there is room "
        r"for 3\.8 GB: of 256\.0 GB of available memory .* the host's weights take "
        r"40\.0 GB, local ducks 210\.0 GB and vLLM's processes 1\.2 GB, .* lower "
        r"--max-model-len, or"
    )
    with pytest.raises(DuckConfigError, match=match):
        choose(replace(MEMORY, duck_weights=210 * GB), V32)


def test_weights_that_do_not_fit_are_no_matter_of_the_length():
    match = "room for 0 MB: .* may be used; free memory, or set --kv-cache-memory-bytes"
    with pytest.raises(DuckConfigError, match=match):
        choose(replace(MEMORY, duck_weights=665 * GB), V32, is_fitted=True)


def test_a_length_that_vllm_may_choose_takes_what_there_is():
    little = replace(MEMORY, duck_weights=210 * GB)
    num_bytes = choose(little, V32, is_fitted=True)
    assert 0 <= 0.8 * little.left - num_bytes < V32.block_bytes


def test_auto_is_a_length_that_vllm_may_choose(tiny_model, monkeypatch):
    """As `vllm serve --max-model-len auto`."""
    little = Memory(
        node=_PROCESS_BYTES + 10**6,
        total=_PROCESS_BYTES + 10**6,
        host_weights=0,
        duck_weights=0,
    )
    monkeypatch.setattr(kv_space, "_memory", lambda config: little)
    assert 0 < kv_bytes(tiny_model, max_model_len=-1) <= 800_000
    with pytest.raises(DuckConfigError, match="lower --max-model-len"):
        kv_bytes(tiny_model, max_model_len=2048)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_s_page_cache_is_free(tmp_path, version):
    group = tmp_path / "sys/fs/cgroup" / ("memory" if version == "v1" else "")
    group.mkdir(parents=True)
    prefix = "total_" if version == "v1" else ""
    (group / "memory.stat").write_text(
        f"anon 7\n{prefix}inactive_file 5000\n{prefix}active_file 300\nshmem 11\n"
    )
    assert page_cache_bytes(tmp_path) == 5300
    assert page_cache_bytes(tmp_path / "sys") == 0


def test_vllm_counts_a_container_s_page_cache_as_free_where_duck_asks(monkeypatch):
    gib = 2**30
    monkeypatch.setattr(cpu_resource_utils, "get_cgroup_memory_limit", lambda: 2 * gib)
    monkeypatch.setattr(
        cpu_resource_utils, "get_cgroup_memory_usage", lambda: 2 * gib - 4096
    )
    monkeypatch.setattr(cgroup_memory, "page_cache_bytes", lambda: gib)
    with hooks.page_cache_is_free():
        assert cpu_resource_utils.get_memory_node_info(0).available_memory > gib - 1
    assert cpu_resource_utils.get_memory_node_info(0).available_memory == 4096


@pytest.mark.parametrize("requantized", [None, "int8", "int4"])
def test_weights_are_counted_as_they_are_held(tiny_model, requantized):
    checkpoint = Checkpoint(tiny_model)
    model = checkpoint.summary.requantized(requantized)
    (whole,) = ShardPlan.even(
        1, num_columns=model.moe_intermediate_size, num_experts=model.n_routed_experts
    ).shards
    held = shard_bytes(model, whole)
    assert abs(duck_weight_bytes(checkpoint, requantized) / held - 1) < 0.01
    on_disk = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    experts = duck_weight_bytes(checkpoint, None)
    # Headers are small.
    assert 0.9 < host_weight_bytes(checkpoint) / (on_disk - experts) <= 1.0


def kv_bytes(model, **changes):
    return (
        make_args(model, **changes)
        .create_engine_config()
        .cache_config.kv_cache_memory_bytes
    )


@pytest.fixture
def huge_machine(monkeypatch):
    monkeypatch.setattr(kv_space, "_memory", lambda config: MEMORY)


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [({}, 4), ({"speculative_config": {"method": "duck_mtp1"}}, 5)],
    ids=["plain", "drafts"],
)
def test_an_engine_without_a_size_gets_the_default(
    tiny_model, huge_machine, changes, num_layers
):
    args = make_args(tiny_model, max_num_seqs=6, **changes)
    config, again = args.create_engine_config(), args.create_engine_config()
    # 512 tokens in blocks of 16, and the draft behind them in one of its own.
    num_blocks = 6 * (32 + num_layers - 4) + 1
    expected = num_blocks * 16 * num_layers * (656 + 132)
    assert config.cache_config.kv_cache_memory_bytes == expected
    assert again.cache_config.kv_cache_memory_bytes == expected
    assert args.kv_cache_memory_bytes is None


def test_bf16_caches_are_counted_as_such(tiny_model, huge_machine):
    assert kv_bytes(tiny_model, kv_cache_dtype="bfloat16") * (656 + 132) == kv_bytes(
        tiny_model
    ) * (1152 + 256)


def test_what_the_user_chose_in_any_way_stays(tiny_model, huge_machine, monkeypatch):
    assert kv_bytes(tiny_model, kv_cache_memory_bytes=12345678) == 12345678
    assert kv_bytes(tiny_model, gpu_memory_utilization=0.5) is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert kv_bytes(tiny_model) == 2 << 30


def test_a_refusal_leaves_no_trace(tiny_model, monkeypatch):
    monkeypatch.setattr(kv_space, "_memory", lambda config: replace(MEMORY, node=0))
    with pytest.raises(DuckConfigError, match="room for 0 MB"):
        kv_bytes(tiny_model)
    assert not set(CHOSEN) & os.environ.keys()


def test_without_ducks_vllm_chooses(tiny_v3_model, huge_machine):
    assert kv_bytes(tiny_v3_model, duck=None) is None


def test_this_machine_has_room_for_the_bundled_model(tiny_model, monkeypatch):
    lines = []
    monkeypatch.setattr(
        kv_space.logger, "info", lambda text, *args: lines.append(text % args)
    )
    num_bytes = kv_bytes(tiny_model, max_num_seqs=4)
    assert lines == [
        f"KV caches: {num_bytes / 1e6:.0f} MB for {num_bytes // (4 * 788):,} tokens, "
        "as 4 requests of 512 could use; --kv-cache-memory-bytes sets another size"
    ]
    assert os.environ.get("VLLM_CPU_KVCACHE_SPACE") is None
