"""Local ducks live as long as the process that started them, and no longer."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from testing.ducks.mini_model import make_request
from testing.waiting import WAIT_S, is_running, wait_until
from vllm_duck.errors import (
    DuckCheckpointError,
    DuckConfigError,
    DuckTimeout,
    DuckUnavailable,
)
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.executor.weights.plan import ShardPlan


def test_local_ducks_compute_the_sum_and_end_with_the_block(tmp_path, any_model):
    checkpoint = Checkpoint(any_model.write(tmp_path))
    whole = load_shard(checkpoint, Shard(0, 160, 0, 4), show_progress=False)
    request = make_request()
    expected = ShardMoe(whole, MoeKernel(num_threads=1))(request, "fp32")
    with (
        LocalDucks.start(tmp_path, num_ducks=3) as ducks,
        Fleet.connect(
            ducks.endpoints, expect=checkpoint.summary, reply_dtype="fp32"
        ) as fleet,
    ):
        total = fleet.send(request).wait().total
        pids, directory = ducks.pids, Path(ducks.endpoints[0][len("unix:") :]).parent
        assert ducks.dead() is None
        assert directory.stat().st_mode & 0o777 == 0o700
    scale = np.abs(expected).max()
    np.testing.assert_allclose(total, expected, atol=scale * 2**-18)
    assert not any(is_running(pid) for pid in pids)
    assert not directory.exists()


def test_a_plan_and_endpoints_may_be_given(tmp_path, bf16_checkpoint):
    plan = ShardPlan(160, 4, (Shard(0, 160, 0, 1), Shard(0, 160, 1, 4)))
    listen = [f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"]
    with LocalDucks.start(bf16_checkpoint.model_dir, plan=plan, listen=listen) as ducks:
        assert list(ducks.endpoints) == listen
        with Fleet.connect(listen) as fleet:
            shards = tuple(info.shard for info in fleet.describe())
    assert shards == plan.shards


@pytest.mark.parametrize("weight_format", [None, "int4"])
def test_ducks_start_from_the_directories_of_a_split(
    tmp_path, bf16_checkpoint, weight_format
):
    plan = ShardPlan(160, 4, (Shard(0, 160, 0, 1), Shard(0, 160, 1, 4)))
    split_checkpoint(bf16_checkpoint, plan, tmp_path / "out", show_progress=False)
    summary = bf16_checkpoint.summary.requantized(weight_format)
    with (
        LocalDucks.start(tmp_path / "out", weight_format=weight_format) as ducks,
        Fleet.connect(ducks.endpoints) as fleet,
    ):
        infos = fleet.describe()
    assert tuple(info.shard for info in infos) == plan.shards
    assert {info.model for info in infos} == {summary}


def test_an_incomplete_split_is_refused(tmp_path, bf16_checkpoint):
    plan = ShardPlan.even(3, num_columns=160, num_experts=4)
    split_checkpoint(bf16_checkpoint, plan, tmp_path / "out", show_progress=False)
    shutil.rmtree(tmp_path / "out" / "duck-1")
    match = "must hold the 3 directories of one split, got duck-0, duck-2"
    with pytest.raises(DuckCheckpointError, match=match):
        LocalDucks.start(tmp_path / "out")


def test_a_duck_that_dies_is_named_and_its_calls_fail(bf16_checkpoint):
    with (
        LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=2) as ducks,
        Fleet.connect(ducks.endpoints) as fleet,
    ):
        fleet.send(make_request()).wait()
        os.kill(ducks.pids[1], signal.SIGKILL)
        wait_until(ducks.dead)
        assert ducks.dead() == f"duck {ducks.endpoints[1]} ended with signal 9"
        with pytest.raises(DuckUnavailable, match=ducks.endpoints[1]):
            fleet.send(make_request()).wait()


def test_a_kept_duck_that_is_killed_answers_again(bf16_checkpoint, caplog):
    with (
        LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=2) as ducks,
        Fleet.connect(ducks.endpoints, recover_s=WAIT_S) as fleet,
    ):
        ducks.keep()
        expected = fleet.send(make_request()).wait().total
        first, second = ducks.pids
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: ducks.pids[1] != second)
        np.testing.assert_array_equal(fleet.send(make_request()).wait().total, expected)
        assert ducks.pids[0] == first
        end = f"duck {ducks.endpoints[1]} ended with signal 9"
        assert ducks.ends() == {ducks.endpoints[1]: end}
        assert f"{end}; starting it again at once" in caplog.text
        pids = ducks.pids
    assert not any(is_running(pid) for pid in pids)


def test_a_kept_duck_that_cannot_start_any_more_says_why(tmp_path, bf16_model, caplog):
    model = bf16_model.write(tmp_path)
    with LocalDucks.start(model, num_ducks=1) as ducks:
        ducks.keep()
        (model / "config.json").unlink()
        os.kill(ducks.pids[0], signal.SIGKILL)
        wait_until(lambda: "after 3 times within 60 s" in caplog.text)
        (end,) = ducks.ends().values()
        assert "ended with exit code" in end
        assert "config.json" in end


def _connect_with_a_short_deadline(endpoints):
    fleets = []

    def is_connected():
        try:
            fleets.append(Fleet.connect(endpoints, deadline_s=2))
        except DuckTimeout:  # a slow machine
            return False
        return True

    wait_until(is_connected)
    return fleets[0]


def test_a_duck_that_hangs_is_a_timeout_with_its_name(bf16_checkpoint):
    with (
        LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=2) as ducks,
        _connect_with_a_short_deadline(ducks.endpoints) as fleet,
    ):
        os.kill(ducks.pids[1], signal.SIGSTOP)
        # It may run on for a moment, and a moment is enough to answer.
        os.waitpid(ducks.pids[1], os.WUNTRACED)
        with pytest.raises(DuckTimeout, match=ducks.endpoints[1]):
            fleet.send(make_request()).wait()
        # On a connection of its own, which gRPC gives up at about the same time.
        with pytest.raises((DuckTimeout, DuckUnavailable), match=ducks.endpoints[1]):
            fleet.describe()
        os.kill(ducks.pids[1], signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ducks_end_when_their_parent_is_killed(tmp_path, bf16_checkpoint, how):
    code = f"""
        import time
        from vllm_duck.executor.serve.local import LocalDucks
        ducks = LocalDucks.start({str(bf16_checkpoint.model_dir)!r}, num_ducks=2)
        print(*ducks.pids, *ducks.endpoints, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    first, second, endpoint, _ = parent.stdout.readline().split()
    assert is_running(first)
    assert is_running(second)
    parent.send_signal(how)
    parent.communicate(timeout=WAIT_S)
    wait_until(lambda: not is_running(first) and not is_running(second))
    directory = Path(endpoint.removeprefix("unix:")).parent
    wait_until(lambda: not directory.exists())


def test_ducks_shed_what_vllm_does_to_its_worker(bf16_checkpoint, monkeypatch):
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        ducks = LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=1)
    finally:
        os.sched_setaffinity(0, allowed)
    with ducks:
        assert os.sched_getaffinity(ducks.pids[0]) == allowed
        environment = Path(f"/proc/{ducks.pids[0]}/environ").read_bytes()
    for name in (b"GOMP_CPU_AFFINITY=", b"LD_PRELOAD=", b"OMP_NUM_THREADS="):
        assert name not in environment


def test_ducks_import_nothing_from_the_working_directory(
    bf16_checkpoint, hostile_directory, monkeypatch
):
    monkeypatch.chdir(hostile_directory)
    with (
        LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=1) as ducks,
        Fleet.connect(ducks.endpoints) as fleet,
    ):
        fleet.send(make_request()).wait()
    assert not list(hostile_directory.glob("*.executed"))


def test_stop_may_be_called_twice(bf16_checkpoint):
    ducks = LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=1)
    ducks.stop()
    ducks.stop()


def test_a_checkpoint_that_is_none_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(DuckCheckpointError, match=r"cannot read .*config\.json"):
        LocalDucks.start(tmp_path)


def test_a_duck_that_cannot_start_says_why(tmp_path, bf16_model):
    del bf16_model.tensors["model.layers.2.mlp.experts.0.up_proj.weight"]
    match = "did not start: .* does not list the tensor model.layers.2.mlp.experts.0.up"
    with pytest.raises(DuckUnavailable, match=match):
        LocalDucks.start(bf16_model.write(tmp_path), num_ducks=2)


def test_a_duck_that_crashes_while_it_starts_says_how(bf16_checkpoint):
    with pytest.raises(DuckUnavailable, match="did not start: it ended with exit code"):
        LocalDucks.start(
            bf16_checkpoint.model_dir, num_ducks=1, serve_flags=["--no-such-flag"]
        )


def test_ducks_that_take_too_long_to_start_are_a_timeout(bf16_checkpoint):
    with pytest.raises(DuckTimeout, match="did not serve within start_s=0"):
        LocalDucks.start(bf16_checkpoint.model_dir, num_ducks=1, start_s=0)


def test_a_socket_path_that_is_too_long_is_refused_with_the_knob(
    bf16_checkpoint, tmp_path, monkeypatch
):
    long_directory = tmp_path / ("x" * 100)
    long_directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long_directory))
    with pytest.raises(
        DuckConfigError,
        match="at most 107 bytes, got .* shorter directory with .* TMPDIR",
    ):
        LocalDucks.start(bf16_checkpoint.model_dir)
