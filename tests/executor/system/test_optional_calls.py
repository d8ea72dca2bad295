"""Without flock or fsync the work goes on with one warning; an error is an error."""

import errno
import fcntl
import logging
import os

import pytest

from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.system import optional_calls
from vllm_duck.executor.system.temporary import temporary_directory
from vllm_duck.executor.weights.plan import ShardPlan

PLAN = ShardPlan.even(2, num_columns=160, num_experts=4)
REFUSALS = [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.EBADF]
REFUSAL_NAMES = [errno.errorcode[number] for number in REFUSALS]


@pytest.fixture
def refuse(monkeypatch, caplog):
    """Let a call fail with an errno, and count the warnings from then on."""
    optional_calls._warn_once.cache_clear()
    caplog.set_level(logging.WARNING)

    def refuse_call(module, name, number):
        def fail(*args):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(module, name, fail)

    yield refuse_call
    optional_calls._warn_once.cache_clear()


def files_of(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def split(checkpoint, out_dir):
    split_checkpoint(checkpoint, PLAN, out_dir, show_progress=False)
    return files_of(out_dir)


@pytest.mark.parametrize("number", REFUSALS, ids=REFUSAL_NAMES)
def test_a_temporary_directory_needs_no_lock(tmp_path, monkeypatch, refuse, number):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "duck-test-left"
    left.mkdir()
    os.utime(left, (1, 1))
    refuse(fcntl, "flock", number)
    assert temporary_directory("duck-test-").is_dir()
    assert temporary_directory("duck-test-").is_dir()
    # Nobody can say whether its owner lives.
    assert left.is_dir()


@pytest.mark.parametrize("number", REFUSALS, ids=REFUSAL_NAMES)
@pytest.mark.parametrize("call", [(fcntl, "flock"), (os, "fsync")], ids=str)
def test_a_split_needs_neither_call_and_warns_once(
    tmp_path, bf16_checkpoint, refuse, caplog, call, number
):
    expected = split(bf16_checkpoint, tmp_path / "expected")
    assert not caplog.records
    refuse(*call, number)
    assert split(bf16_checkpoint, tmp_path / "out") == expected
    (record,) = caplog.records
    assert f"refuses {call[1]} ({os.strerror(number)})" in record.getMessage()


def test_a_split_that_was_cut_continues_without_the_calls(
    tmp_path, bf16_checkpoint, refuse, monkeypatch
):
    expected = split(bf16_checkpoint, tmp_path / "expected")
    refuse(fcntl, "flock", errno.ENOSYS)
    refuse(os, "fsync", errno.EINVAL)
    with monkeypatch.context() as patch:
        patch.setattr(
            "vllm_duck.executor.split.writer._Writer._write_manifests",
            lambda *args: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            split(bf16_checkpoint, tmp_path / "out")
    assert split(bf16_checkpoint, tmp_path / "out") == expected


def test_a_disk_that_fails_stops_the_split(tmp_path, bf16_checkpoint, refuse):
    refuse(os, "fsync", errno.EIO)
    with pytest.raises(DuckCheckpointError, match="once that is mended"):
        split(bf16_checkpoint, tmp_path / "out")


def test_a_lock_that_another_holds_is_no_refusal(tmp_path, bf16_checkpoint, refuse):
    refuse(fcntl, "flock", errno.EWOULDBLOCK)
    with pytest.raises(DuckConfigError, match="another split is writing"):
        split(bf16_checkpoint, tmp_path / "out")
