"""What a checkpoint is read to be, and what is said of a damaged one."""

import json
import os

import pytest

from testing.ducks.mini_model import (
    CONFIG,
    FP8,
    LAYER_IDS,
    expert_name,
    make_mini_model,
)
from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.weights import fingerprint
from vllm_duck.executor.weights.checkpoint import Checkpoint

NAME = expert_name(2, 1, "up")


def test_sizes_and_layers_come_from_config_and_index(bf16_checkpoint):
    summary = bf16_checkpoint.summary
    assert summary.layer_ids == LAYER_IDS
    assert (summary.hidden_size, summary.moe_intermediate_size) == (32, 160)
    assert (summary.n_routed_experts, summary.weight_format) == (4, "bf16")


def test_an_mtp_layer_that_the_checkpoint_lacks_does_not_count(tmp_path, bf16_model):
    bf16_model.tensors = {
        name: value
        for name, value in bf16_model.tensors.items()
        if not name.startswith("model.layers.3.")
    }
    assert Checkpoint(bf16_model.write(tmp_path)).moe_layer_ids == (1, 2)


def test_layers_follow_moe_layer_freq(tmp_path, bf16_model):
    bf16_model.config.update(num_hidden_layers=8, moe_layer_freq=3)
    assert Checkpoint(bf16_model.write(tmp_path)).moe_layer_ids == (3, 6)


@pytest.mark.parametrize(("step", "expected"), [(1, (1, 2, 3)), (2, (2,))])
def test_the_mtp_layer_follows_moe_layer_freq_too(tmp_path, bf16_model, step, expected):
    bf16_model.config["moe_layer_freq"] = step
    assert Checkpoint(bf16_model.write(tmp_path)).moe_layer_ids == expected


def test_block_fp8_is_recognised(tmp_path, bf16_model):
    bf16_model.config["quantization_config"] = FP8
    checkpoint = Checkpoint(bf16_model.write(tmp_path))
    assert checkpoint.weight_format == "e4m3-block128"


def test_the_fingerprint_does_not_depend_on_how_tensors_are_cut_into_files(
    tmp_path, bf16_model
):
    prints = set()
    for num_files in (None, 1, 3):
        bf16_model.num_files = num_files
        directory = bf16_model.write(tmp_path / str(num_files))
        prints.add(Checkpoint(directory).fingerprint)
    assert len(prints) == 1


def test_the_fingerprint_ignores_what_tools_rewrite(tmp_path, bf16_model):
    before = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    bf16_model.config.update(transformers_version="9", _name_or_path="/elsewhere")
    assert Checkpoint(bf16_model.write(tmp_path)).fingerprint == before


def test_the_fingerprint_sees_config_and_names(tmp_path, bf16_model):
    before = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    bf16_model.config["routed_scaling_factor"] = 1.5
    changed_config = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    del bf16_model.tensors[NAME]
    changed_names = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    assert len({before, changed_config, changed_names}) == 3


@pytest.mark.parametrize("weight_format", ["bf16", "e4m3-block128"])
def test_the_fingerprint_tells_two_trainings_of_one_model_apart(
    tmp_path, weight_format
):
    one, other = (
        Checkpoint(make_mini_model(weight_format, seed).write(tmp_path / str(seed)))
        for seed in range(2)
    )
    assert one.config == other.config
    assert one.tensor_names == other.tensor_names
    assert one.fingerprint != other.fingerprint


def test_the_fingerprint_sees_type_and_shape(tmp_path, bf16_model):
    before = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    name = "model.layers.3.enorm.weight"
    bits = bf16_model.tensors[name][1]
    bf16_model.tensors[name] = ("F16", bits)
    other_type = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    bf16_model.tensors[name] = ("BF16", bits.reshape(2, 2))
    other_shape = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    assert len({before, other_type, other_shape}) == 3


def test_the_fingerprint_of_many_tensors_reads_some_of_each_layer(
    tmp_path, bf16_model, monkeypatch
):
    """Its cost does not grow with the model."""
    monkeypatch.setattr(fingerprint, "_MAX_TENSORS", 6)
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args) or pread(*args))
    before = Checkpoint(bf16_model.write(tmp_path)).fingerprint
    assert len(reads) == 6
    assert all(size <= 4096 for _, size, _ in reads)
    for layer_idx in LAYER_IDS:
        changed = make_mini_model()
        for name, (_, bits) in changed.tensors.items():
            if f"layers.{layer_idx}.mlp" in name:
                bits ^= 1
        assert Checkpoint(changed.write(tmp_path)).fingerprint != before


def test_the_fingerprint_of_a_truncated_checkpoint_is_an_error(tmp_path, bf16_model):
    directory = bf16_model.write(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DuckCheckpointError, match="is truncated"):
        _ = Checkpoint(directory).fingerprint


@pytest.mark.parametrize("num_files", [None, 3])
def test_a_place_has_the_tensor_bytes(tmp_path, bf16_model, num_files):
    bf16_model.num_files = num_files
    place = Checkpoint(bf16_model.write(tmp_path)).place_of(NAME)
    data = place.path.read_bytes()[place.begin : place.end]
    assert data == bf16_model.tensors[NAME][1].tobytes()
    assert (place.dtype, place.shape) == ("BF16", (160, 32))


def test_a_tensor_that_the_checkpoint_lacks_is_named(bf16_checkpoint):
    with pytest.raises(DuckCheckpointError, match="does not list the tensor nobody"):
        bf16_checkpoint.place_of("nobody")


def test_a_tensor_that_only_the_index_has_is_named(tmp_path, bf16_model):
    bf16_model.num_files = 2
    directory = bf16_model.write(tmp_path)
    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    file_name = index["weight_map"]["ghost"] = "model-00000.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(DuckCheckpointError, match=f"{file_name} must hold .* ghost"):
        Checkpoint(directory).place_of("ghost")


def test_a_truncated_file_is_named_with_both_lengths(tmp_path, bf16_model):
    path = bf16_model.write(tmp_path) / "model.safetensors"
    length = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    match = (
        f"is truncated: the tensor .* ends at byte {length}, the file at {length - 1}"
    )
    with pytest.raises(DuckCheckpointError, match=match):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"\xff" * 64,
        (5).to_bytes(8, "little") + b"hello",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"a": 1}',
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DuckCheckpointError, match="must be a safetensors file"):
        Checkpoint(tmp_path)


def test_a_missing_shard_file_is_named(tmp_path, bf16_model):
    bf16_model.num_files = 2
    checkpoint = Checkpoint(bf16_model.write(tmp_path))
    path = checkpoint.file_of(NAME)
    path.unlink()
    with pytest.raises(DuckCheckpointError, match=f"cannot read {path}: No such file"):
        checkpoint.place_of(NAME)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "cannot read .*config.json: No such file"),
        ({"config.json": "{"}, "config.json must be JSON"),
        ({"config.json": "[]"}, "config.json must be a JSON object"),
        ({"config.json": "{}"}, "must hold model.safetensors.index.json or model.safe"),
        (
            {"config.json": "{}", "model.safetensors.index.json": "{}"},
            "index.json must have a weight_map",
        ),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path, files, match):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DuckCheckpointError, match=match):
        Checkpoint(tmp_path)


def test_a_config_of_another_kind_of_model_is_refused(tmp_path, bf16_model):
    del bf16_model.config["n_routed_experts"]
    match = "n_routed_experts must be an integer >= 1, got None; is it a DeepSeek-V3.2"
    with pytest.raises(DuckCheckpointError, match=match):
        _ = Checkpoint(bf16_model.write(tmp_path)).summary


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "gptq"}, {**FP8, "weight_block_size": [64, 64]}, "fp8"],
)
def test_another_quantization_is_refused(tmp_path, bf16_model, quantization):
    bf16_model.config["quantization_config"] = quantization
    match = r"experts must be bf16, or fp8 with weight_block_size \[128, 128\]"
    with pytest.raises(DuckCheckpointError, match=match):
        _ = Checkpoint(bf16_model.write(tmp_path)).summary
