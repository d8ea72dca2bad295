"""`vllm-duck split` and serving from what it wrote, beside ducks of the checkpoint."""

import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from testing.ducks.mini_model import make_mini_model, make_request
from vllm_duck.cli import main
from vllm_duck.cli import split as split_command
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.plan import ShardPlan


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    model = make_mini_model("e4m3-block128")
    return model.write(tmp_path_factory.mktemp("model"))


def _split(model_dir, out_dir, *options):
    return main(["split", str(model_dir), str(out_dir), *options])


def _fails(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 1
    return capsys.readouterr().err


@contextmanager
def _serving(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_duck.cli", "serve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def _answer(commands):
    with ExitStack() as stack:
        listen = [command[-1].removeprefix("--listen=") for command in commands]
        for command in commands:
            stack.enter_context(_serving(*command))
        fleet = stack.enter_context(Fleet.connect(listen))
        return fleet.send(make_request()).wait().total


def test_ducks_of_a_split_and_of_the_checkpoint_make_one_fleet(model_dir, tmp_path):
    assert _split(model_dir, tmp_path / "out", "--ducks=2") == 0
    listen = [f"--listen=unix:{tmp_path}/{index}" for index in range(2)]
    full = [(model_dir, f"--shard={i}/2", "--threads=1", listen[i]) for i in range(2)]
    mixed = [full[0], (tmp_path / "out" / "duck-1", "--threads=1", listen[1])]
    np.testing.assert_array_equal(_answer(mixed), _answer(full))


def test_split_says_what_it_wrote_and_what_it_kept(model_dir, tmp_path, capsys):
    out_dir = tmp_path / "out"
    assert _split(model_dir, out_dir, "--weights=3,1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"wrote 0.\d MB in \d+.\d s", lines[0])
    assert lines[1:] == [
        f"{out_dir}/duck-0  columns [0, 128) x experts [0, 4)",
        f"{out_dir}/duck-1  columns [128, 160) x experts [0, 4)",
        f"next, on each duck's machine: vllm-duck serve {out_dir}/duck-0 --listen "
        "HOST:PORT",
    ]
    assert _split(model_dir, out_dir, "--weights=3,1") == 0
    assert ", kept 0." in capsys.readouterr().out


def test_split_by_expert_ranges(model_dir, tmp_path, capsys):
    assert _split(model_dir, tmp_path, "--experts-by=0:1,1:4") == 0
    assert "duck-1  columns [0, 160) x experts [1, 4)" in capsys.readouterr().out


def test_split_by_a_plan(model_dir, tmp_path, capsys):
    assert main(["plan", str(model_dir), "--experts-by=0:3,3:4"]) == 0
    plan = capsys.readouterr().out
    assert [s.num_experts for s in ShardPlan.from_json(plan).shards] == [3, 1]
    (tmp_path / "plan").write_text(plan)
    assert _split(model_dir, tmp_path, f"--plan={tmp_path}/plan") == 0
    assert "duck-1  columns [0, 160) x experts [3, 4)" in capsys.readouterr().out


def test_split_that_is_stopped_says_how_to_go_on(
    model_dir, tmp_path, capsys, monkeypatch
):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(split_command, "split_checkpoint", stop)
    assert _split(model_dir, tmp_path) == 130
    assert "the same command continues the split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--experts-by=0:1,1:4", "--ducks=3"], "--experts-by already says how many"),
        (["--experts-by=0:1,1:4", "--weights=1,1"], "--experts-by already says how"),
        (["--experts-by=0:1,2:4"], "leave a gap: nobody holds .* experts .1, 2"),
        (["--experts-by=0:3,2:4"], "shards overlap: shard 0 and shard 1"),
        (["--plan=plan", "--experts-by=0:4"], "--plan already says how many ducks"),
    ],
)
def test_split_refuses_in_one_sentence(model_dir, tmp_path, capsys, options, match):
    assert re.search(match, _fails(capsys, "split", model_dir, tmp_path, *options))


@pytest.mark.parametrize("option", ["--shard=0/2", "--columns=0:80", "--plan=plan"])
def test_serve_from_a_split_takes_no_shard(model_dir, tmp_path, capsys, option):
    _split(model_dir, tmp_path)
    error = _fails(capsys, "serve", tmp_path / "duck-0", option)
    assert "holds one duck's split, which says what the duck holds" in error


def test_serve_from_a_damaged_split_names_the_file(model_dir, tmp_path, capsys):
    _split(model_dir, tmp_path)
    path = tmp_path / "duck-0" / "layer-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    error = _fails(capsys, "serve", path.parent, "--listen=127.0.0.1:0")
    assert f"{path} is damaged" in error


def test_other_commands_say_that_a_split_is_for_serve(model_dir, tmp_path, capsys):
    _split(model_dir, tmp_path)
    error = _fails(capsys, "plan", tmp_path / "duck-0")
    assert "it is one duck's split: start it with `vllm-duck serve" in error


def test_a_split_serves_with_the_fingerprint_of_its_model(model_dir, tmp_path, capsys):
    _split(model_dir, tmp_path)
    listen = f"unix:{tmp_path}/duck"
    with _serving(tmp_path / "duck-1", "--threads=1", f"--listen={listen}") as line:
        assert "serves columns [80, 160)" in line
        assert main(["status", listen]) == 0
    assert Checkpoint(model_dir).fingerprint in capsys.readouterr().out


def test_help_has_an_example_and_states_the_memory(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["split", "--help"])
    output = capsys.readouterr().out
    assert "vllm-duck split MODEL OUT --ducks 3" in output
    assert "Memory: four expert matrices" in output


@pytest.fixture(autouse=True)
def _keep_signal_handlers():
    """`serve` takes over signals, a test run may not."""
    before = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before:
        signal.signal(number, handler)
