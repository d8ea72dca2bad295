"""A split directory serves the bits of the checkpoint, or names what is damaged."""

import json

import numpy as np
import pytest

from testing.ducks.mini_model import make_mini_model, make_request
from vllm_duck.errors import DuckCheckpointError
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.split.format import is_split_directory
from vllm_duck.executor.split.loader import SplitDirectory
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.checksums import FileDigest
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.executor.weights.plan import ShardPlan

PLAN = ShardPlan(
    160, 4, (Shard(0, 112, 0, 4), Shard(112, 160, 0, 1), Shard(112, 160, 1, 4))
)
LAYER_2 = "layer-00002.safetensors"


def _load(directory):
    return SplitDirectory(directory).load(show_progress=False)


def _split(tmp_path, model):
    checkpoint = Checkpoint(model.write(tmp_path / "model"))
    out_dir = tmp_path / "out"
    report = split_checkpoint(checkpoint, PLAN, out_dir, show_progress=False)
    return checkpoint, report.directories


@pytest.fixture
def directory(tmp_path):
    """Columns [112, 160) of the experts [1, 4)."""
    return _split(tmp_path, make_mini_model("e4m3-block128"))[1][2]


def _edit_manifest(directory, edit):
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def _record(manifest, name):
    return next(file for file in manifest["files"] if file["name"] == name)


def test_a_split_computes_the_bits_of_the_full_checkpoint(tmp_path, any_model):
    checkpoint, directories = _split(tmp_path, any_model)
    for directory, shard in zip(directories, PLAN.shards, strict=True):
        split = SplitDirectory(directory)
        assert (split.summary, split.shard) == (checkpoint.summary, shard)
        full = load_shard(checkpoint, shard, show_progress=False)
        loaded = split.load(show_progress=False)
        assert loaded.weight_bytes == full.weight_bytes
        for layer_idx in checkpoint.moe_layer_ids:
            request = make_request(layer_idx=layer_idx)
            got, expected = (
                ShardMoe(each, MoeKernel(num_threads=1))(request, "fp32")
                for each in (loaded, full)
            )
            np.testing.assert_array_equal(got, expected)


def test_a_split_is_read_once(directory):
    files = directory.glob("layer-*")
    assert _load(directory).num_bytes_read == sum(f.stat().st_size for f in files)


def test_a_split_directory_is_one_with_a_manifest(tmp_path, directory):
    assert is_split_directory(directory)
    assert not is_split_directory(tmp_path / "model")


@pytest.mark.parametrize("at_byte", [0, 9, 4000, 4096, 9000, -1])
def test_a_flipped_bit_is_damage_and_the_file_is_named(directory, at_byte):
    path = directory / LAYER_2
    content = bytearray(path.read_bytes())
    content[at_byte] ^= 1
    path.write_bytes(content)
    match = f"{path} is damaged: its CRC-32C must be .* by the manifest, got .* copy"
    with pytest.raises(DuckCheckpointError, match=match):
        _load(directory)


def test_damage_that_makes_a_nan_is_damage_of_the_file(directory):
    path = directory / LAYER_2
    content = bytearray(path.read_bytes())
    content[5000] = 0x7F
    path.write_bytes(content)
    with pytest.raises(DuckCheckpointError, match=f"{path} is damaged: its CRC-32C"):
        _load(directory)


def test_a_nan_of_the_checkpoint_itself_is_named(tmp_path):
    model = make_mini_model("e4m3-block128")
    model.tensors["model.layers.3.mlp.experts.2.down_proj.weight"][1][5, 130] = 0x7F
    _, directories = _split(tmp_path, model)
    match = "layer-00003.safetensors: expert 1 of the shard: down_proj.weight must be"
    with pytest.raises(DuckCheckpointError, match=match):
        _load(directories[2])


@pytest.mark.parametrize("file_name", [LAYER_2, "config.json"])
def test_a_truncated_file_is_named_with_both_lengths(directory, file_name):
    path = directory / file_name
    num_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    match = f"{path} must have {num_bytes} bytes, got {num_bytes - 1}; copy it again"
    with pytest.raises(DuckCheckpointError, match=match):
        SplitDirectory(directory)


@pytest.mark.parametrize("file_name", [LAYER_2, "config.json"])
def test_a_missing_file_is_named(directory, file_name):
    (directory / file_name).unlink()
    match = f"cannot read {directory / file_name}: No such file"
    with pytest.raises(DuckCheckpointError, match=match):
        SplitDirectory(directory)


def test_a_file_that_shrinks_after_the_check_is_named(directory):
    split = SplitDirectory(directory)
    path = directory / LAYER_2
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DuckCheckpointError, match=f"{path} ended before its .* replac"):
        split.load(show_progress=False)


def test_a_config_of_another_model_is_damage(directory):
    path = directory / "config.json"
    path.write_text(path.read_text().replace("32", "64", 1))
    with pytest.raises(DuckCheckpointError, match=f"{path} is damaged: its CRC-32C"):
        SplitDirectory(directory)


def test_a_file_of_another_layer_is_named(directory):
    content = (directory / "layer-00001.safetensors").read_bytes()
    (directory / LAYER_2).write_bytes(content)
    digest = FileDigest()
    digest.update(content)
    record = digest.record()
    _edit_manifest(directory, lambda m: _record(m, LAYER_2).update(record))
    match = rf"{LAYER_2} must hold layer 2 of columns \[112, 160\) x .* another file"
    with pytest.raises(DuckCheckpointError, match=match):
        _load(directory)


def test_a_manifest_that_lacks_a_file_is_refused(directory):
    _edit_manifest(directory, lambda m: m["files"].remove(_record(m, LAYER_2)))
    with pytest.raises(DuckCheckpointError, match=f"manifest.json lacks {LAYER_2}"):
        SplitDirectory(directory)


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(DuckCheckpointError, match="cannot read .*manifest.json: No su"):
        SplitDirectory(tmp_path)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda m: m.update(format="vllm_duck.split/1"),
            "must be of vllm_duck.split/2, got vllm_duck.split/1, .*; remove the dir",
        ),
        (lambda m: m.update(format="other/1"), "format 'other/1', expected \"vllm_du"),
        (lambda m: m.pop("plan"), "is damaged: 'plan'; copy it again"),
        (lambda m: m["model"].pop("hidden_size"), "is damaged: .*hidden_size"),
        (lambda m: m["plan"]["shards"].pop(), "is damaged: .* leave a gap"),
        (lambda m: m.update(index=3), r"index must be in \[0, 3\), got 3"),
        (lambda m: m["files"][0].pop("sha256"), "is damaged: .*sha256"),
    ],
)
def test_a_damaged_manifest_is_refused(directory, edit, match):
    _edit_manifest(directory, edit)
    with pytest.raises(DuckCheckpointError, match=match):
        SplitDirectory(directory)


def test_a_manifest_that_is_no_json_is_refused(directory):
    (directory / "manifest.json").write_text("{")
    with pytest.raises(DuckCheckpointError, match="must be the manifest of a split"):
        SplitDirectory(directory)
