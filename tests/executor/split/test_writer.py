"""A split has every byte once, is bounded in memory, and resumes where it stopped."""

import json
import shutil
import weakref
from collections import namedtuple

import pytest
from safetensors import safe_open

from testing.ducks.mini_model import (
    LAYER_IDS,
    NUM_COLUMNS,
    NUM_EXPERTS,
    expert_name,
    make_mini_model,
)
from vllm_duck.errors import DuckCheckpointError, DuckConfigError, DuckShapeError
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.split.format import LayerLayout, Manifest
from vllm_duck.executor.split.journal import JOURNAL_FILE, SplitJournal
from vllm_duck.executor.split.whole_files import LayerFile
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.headers import read_header
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.executor.weights.tensor_reader import TensorReader

UNEVEN = ShardPlan(
    NUM_COLUMNS,
    NUM_EXPERTS,
    (Shard(0, 112, 0, 4), Shard(112, 160, 0, 1), Shard(112, 160, 1, 4)),
)
HALVES = ShardPlan.even(2, num_columns=NUM_COLUMNS, num_experts=NUM_EXPERTS)


def _split(checkpoint, out_dir, plan=UNEVEN):
    return split_checkpoint(checkpoint, plan, out_dir, show_progress=False)


def _contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(make_mini_model("e4m3-block128").write(tmp_path / "model"))


def _interrupt(checkpoint, out_dir, monkeypatch):
    """Let the disk fail when layer 2 is complete but for its name."""
    finish = LayerFile.finish

    def fail(file):
        if file.layout.layer_idx == 2:
            raise OSError(28, "No space left on device")
        return finish(file)

    with monkeypatch.context() as patch:
        patch.setattr(LayerFile, "finish", fail)
        match = f"split into {out_dir} stopped: .*No space left.* same command continue"
        with pytest.raises(DuckCheckpointError, match=match):
            _split(checkpoint, out_dir)


@pytest.mark.parametrize("num_files", [None, 3])
def test_every_tensor_has_the_bytes_of_its_slice(tmp_path, any_model, num_files):
    any_model.num_files = num_files
    checkpoint = Checkpoint(any_model.write(tmp_path / "model"))
    report = _split(checkpoint, tmp_path / "out")
    for directory, shard in zip(report.directories, UNEVEN.shards, strict=True):
        path = directory / "layer-00002.safetensors"
        places = read_header(path)
        columns = slice(shard.column_lo, shard.column_hi)
        blocks = slice(shard.column_lo // 128, -(-shard.column_hi // 128))
        names = [
            name
            for name in any_model.tensors
            if name.startswith("model.layers.2.mlp.experts.")
            and shard.expert_lo <= int(name.split(".")[5]) < shard.expert_hi
        ]
        assert set(places) == set(names)
        for name in names:
            dtype, whole = any_model.tensors[name]
            own = blocks if "scale" in name else columns
            part = whole[:, own] if "down_proj" in name else whole[own]
            place = places[name]
            assert (place.dtype, place.shape) == (dtype, part.shape)
            assert path.read_bytes()[place.begin : place.end] == part.tobytes()


def test_an_expert_is_one_read_and_the_first_is_aligned(tmp_path, checkpoint):
    directory = _split(checkpoint, tmp_path / "out").directories[2]
    places = sorted(
        read_header(directory / "layer-00001.safetensors").values(),
        key=lambda place: place.begin,
    )
    assert places[0].begin == 4096
    assert all(a.end == b.begin for a, b in zip(places, places[1:], strict=False))
    assert [place.name.split(".")[5] for place in places] == [*"111111222222333333"]


def test_the_safetensors_library_reads_a_file(tmp_path, checkpoint):
    directory = _split(checkpoint, tmp_path / "out").directories[0]
    with safe_open(directory / "layer-00003.safetensors", framework="np") as file:
        assert len(file.keys()) == 6 * NUM_EXPERTS
        assert file.get_slice(expert_name(3, 1, "up")).get_shape() == [112, 32]
        assert "columns [0, 112)" in file.metadata()["shard"]


def test_a_file_follows_from_model_shard_and_layer_alone(tmp_path, checkpoint):
    report = _split(checkpoint, tmp_path / "out")
    for directory, shard in zip(report.directories, UNEVEN.shards, strict=True):
        for layer_idx in LAYER_IDS:
            layout = LayerLayout(checkpoint.summary, shard, layer_idx)
            content = (directory / layout.file_name).read_bytes()
            assert content.startswith(layout.header)
            assert len(content) == layout.num_bytes


def test_a_manifest_survives_its_file(tmp_path, checkpoint):
    report = _split(checkpoint, tmp_path / "out")
    for index, directory in enumerate(report.directories):
        manifest = Manifest.read(directory)
        assert (manifest.plan, manifest.index) == (UNEVEN, index)
        assert manifest.model == checkpoint.summary
        assert manifest.to_json() == (directory / "manifest.json").read_text()
    config = checkpoint.model_dir / "config.json"
    assert (directory / "config.json").read_bytes() == config.read_bytes()


def test_each_tensor_is_read_once_and_two_are_in_memory(
    tmp_path, checkpoint, monkeypatch
):
    read = TensorReader.read
    names, tensors, num_alive = [], [], []

    def track(reader, place, rows, columns):
        whole = read(reader, place, rows, columns)
        assert whole.shape == place.shape
        names.append(place.name)
        tensors.append(weakref.ref(whole))
        num_alive.append(sum(tensor() is not None for tensor in tensors))
        return whole

    monkeypatch.setattr(TensorReader, "read", track)
    _split(checkpoint, tmp_path / "out")
    assert sorted(names) == sorted(n for n in checkpoint.tensor_names if ".mlp." in n)
    assert max(num_alive) <= 2


def test_a_split_that_stopped_continues_and_has_the_same_bytes(
    tmp_path, checkpoint, monkeypatch
):
    out_dir = tmp_path / "out"
    _interrupt(checkpoint, out_dir, monkeypatch)
    names = {path.name for path in (out_dir / "duck-0").iterdir()}
    assert "layer-00001.safetensors" in names
    assert not names & {"layer-00002.safetensors", "manifest.json"}
    first = out_dir / "duck-0" / "layer-00001.safetensors"
    inode = first.stat().st_ino
    report = _split(checkpoint, out_dir)
    assert report.num_bytes_kept > 0
    assert first.stat().st_ino == inode
    _split(checkpoint, tmp_path / "at-once")
    assert _contents(out_dir) == _contents(tmp_path / "at-once")


def test_a_finished_split_is_left_alone(tmp_path, checkpoint):
    first = _split(checkpoint, tmp_path / "out")
    again = _split(checkpoint, tmp_path / "out")
    assert (again.num_bytes_kept, again.num_bytes_written) == (
        first.num_bytes_written,
        0,
    )


@pytest.mark.parametrize("file_name", ["manifest.json", "layer-00002.safetensors"])
def test_a_finished_split_that_lost_a_file_is_written_again(
    tmp_path, checkpoint, file_name
):
    out_dir = tmp_path / "out"
    _split(checkpoint, out_dir)
    before = _contents(out_dir)
    (out_dir / "duck-1" / file_name).unlink()
    assert _split(checkpoint, out_dir).num_bytes_written > 0
    assert _contents(out_dir) == before


def test_a_finished_layer_that_was_cut_since_is_written_again(
    tmp_path, checkpoint, monkeypatch
):
    out_dir = tmp_path / "out"
    _interrupt(checkpoint, out_dir, monkeypatch)
    path = out_dir / "duck-1" / "layer-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert _split(checkpoint, out_dir).num_bytes_kept == 0
    _split(checkpoint, tmp_path / "at-once")
    assert _contents(out_dir) == _contents(tmp_path / "at-once")


@pytest.mark.parametrize("torn", [b'{"layer": 2, "fi', b""])
def test_a_torn_line_of_the_journal_counts_as_none(
    tmp_path, checkpoint, monkeypatch, torn
):
    out_dir = tmp_path / "out"
    _interrupt(checkpoint, out_dir, monkeypatch)
    with (out_dir / JOURNAL_FILE).open("ab") as file:
        file.write(torn)
    assert _split(checkpoint, out_dir).num_bytes_kept > 0


def test_a_damaged_journal_is_named(tmp_path, checkpoint, monkeypatch):
    out_dir = tmp_path / "out"
    _interrupt(checkpoint, out_dir, monkeypatch)
    (out_dir / JOURNAL_FILE).write_bytes(b"{]\n")
    with pytest.raises(DuckConfigError, match=f"{JOURNAL_FILE} is damaged: .* remove"):
        _split(checkpoint, out_dir)


def test_an_unfinished_split_by_another_plan_is_refused(
    tmp_path, checkpoint, monkeypatch
):
    _interrupt(checkpoint, tmp_path / "out", monkeypatch)
    with pytest.raises(DuckConfigError, match="holds an unfinished split of another"):
        _split(checkpoint, tmp_path / "out", HALVES)


def test_a_finished_split_by_another_plan_is_refused(tmp_path, checkpoint):
    _split(checkpoint, tmp_path / "out")
    with pytest.raises(DuckConfigError, match="duck-. belongs to a split of another"):
        _split(checkpoint, tmp_path / "out", HALVES)


def test_two_splits_into_one_directory_are_refused(tmp_path, checkpoint):
    with (
        SplitJournal(tmp_path, {"format": "any"}),
        pytest.raises(DuckConfigError, match=f"another split is writing .*{tmp_path}"),
    ):
        _split(checkpoint, tmp_path)


def test_a_disk_without_room_is_found_before_writing(tmp_path, checkpoint, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(DuckConfigError, match=r"needs 0.0 GB more and its disk has"):
        _split(checkpoint, tmp_path / "out")
    assert not list((tmp_path / "out").glob("duck-*"))


def test_a_missing_tensor_is_found_before_writing(tmp_path, bf16_model):
    name = expert_name(3, 3, "down")
    del bf16_model.tensors[name]
    checkpoint = Checkpoint(bf16_model.write(tmp_path / "model"))
    with pytest.raises(DuckCheckpointError, match=f"does not list the tensor {name};"):
        _split(checkpoint, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_columns_that_the_kernel_cannot_use_are_found_before_writing(
    tmp_path, checkpoint
):
    plan = ShardPlan(160, 4, (Shard(0, 24, 0, 4), Shard(24, 160, 0, 4)))
    with pytest.raises(DuckShapeError, match="num_columns must be a positive multiple"):
        _split(checkpoint, tmp_path / "out", plan)


def test_an_output_that_cannot_be_made_is_named(tmp_path, checkpoint):
    (tmp_path / "file").touch()
    with pytest.raises(DuckCheckpointError, match=f"stopped: .*{tmp_path}/file/out"):
        _split(checkpoint, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"index": 3}, r"index must be in \[0, 3\), got 3"),
        ({"index": -1}, r"index must be in \[0, 3\), got -1"),
        (
            {"plan": ShardPlan.even(3, num_columns=128, num_experts=4)},
            r"must be for \(160, 4\) columns and experts, got \(128, 4\)",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(checkpoint, changes, match):
    fields = {"model": checkpoint.summary, "plan": UNEVEN, "index": 0, "files": ()}
    with pytest.raises(DuckConfigError, match=match):
        Manifest(**{**fields, **changes})


def test_the_manifest_is_json_that_people_can_read(tmp_path, checkpoint):
    directory = _split(checkpoint, tmp_path / "out").directories[1]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["model"]["fingerprint"] == checkpoint.fingerprint
    assert manifest["plan"]["shards"][1] == {"columns": [112, 160], "experts": [0, 1]}
    assert [file["name"] for file in manifest["files"]] == [
        "config.json",
        *(f"layer-0000{layer_idx}.safetensors" for layer_idx in LAYER_IDS),
    ]
