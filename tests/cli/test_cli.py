"""The `vllm-duck` command: what it prints, how it ends, what it says of mistakes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import vllm_duck
from testing.ducks.mini_model import make_info, make_mini_model, make_request
from testing.ducks.wire_peers import echo, serving
from testing.waiting import WAIT_S, is_running, wait_until
from vllm_duck.cli import main, options
from vllm_duck.cli.stopping import StopRequest
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.plan import ShardPlan

HANDLED = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_mini_model().write(tmp_path_factory.mktemp("model"))


@contextmanager
def _running(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_duck.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def _fails(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("vllm-duck: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_signal_that_another_thread_catches_stops_too():
    stop = StopRequest()
    caught = threading.Event()

    def catch():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        caught.set()

    threading.Thread(target=catch).start()
    assert stop.wait(WAIT_S)
    assert caught.wait(WAIT_S)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_serve_serves_until_a_signal_and_exits_with_0(model_dir, tmp_path, how):
    listen = f"unix:{tmp_path}/duck"
    with _running("serve", model_dir, "--shard=0/1", f"--listen={listen}") as process:
        line = process.stdout.readline()
        assert re.match(
            rf"duck {listen} serves columns \[0, 160\) x experts \[0, 4\) of 3 layers: "
            r"read 0.4 MB, holds 0.4 MB bf16, \d+ threads, \w+, "
            r"over (the native stream|grpcio, .*)\.",
            line,
        )
        with Fleet.connect([listen], expect=Checkpoint(model_dir).summary) as fleet:
            fleet.send(make_request()).wait()
            process.send_signal(how)
            assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
    assert not (tmp_path / "duck").exists()


def test_serve_on_port_0_says_which_port(model_dir):
    arguments = ("--columns=0:160", "--listen=127.0.0.1:0")
    with _running("serve", model_dir, *arguments) as process:
        endpoint = process.stdout.readline().split()[1]
        assert main(["status", endpoint]) == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def test_serve_takes_its_shard_from_a_plan(model_dir, tmp_path):
    plan = ShardPlan.even(3, num_columns=160, num_experts=4)
    (tmp_path / "plan.json").write_text(plan.to_json())
    arguments = (f"--plan={tmp_path}/plan.json", "--index=1", "--listen=127.0.0.1:0")
    with _running("serve", model_dir, *arguments) as process:
        assert str(plan.shards[1]) in process.stdout.readline()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_up_prints_endpoints_and_ends_all_ducks_with_0(model_dir, how):
    with _running("up", model_dir, "--ducks=2") as process:
        name, _, endpoints = process.stdout.readline().strip().partition("=")
        assert name == "VLLM_DUCK_ENDPOINTS"
        with Fleet.connect(endpoints.split(",")) as fleet:
            fleet.send(make_request()).wait()
            children = _children(process.pid)
            assert len(children) == 2
            process.send_signal(how)
            assert process.wait(WAIT_S) == 0
    assert not any(is_running(child) for child in children)


def test_up_starts_from_a_split_in_another_weight_format(model_dir, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["split", str(model_dir), out, "--weights=3,1"]) == 0
    with _running("up", out, "--weight-format=int4") as process:
        endpoints = process.stdout.readline().strip().partition("=")[2].split(",")
        capsys.readouterr()
        assert main(["status", *endpoints]) == 0
        assert capsys.readouterr().out.count("int4-group32") == 2
        with Fleet.connect(endpoints) as fleet:
            fleet.send(make_request()).wait()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def test_up_refuses_another_plan_for_a_split(model_dir, tmp_path, capsys):
    assert main(["split", str(model_dir), str(tmp_path / "out"), "--ducks=2"]) == 0
    assert main(["up", str(tmp_path / "out"), "--ducks=2"]) == 1
    assert "is split already, which says what each" in capsys.readouterr().err


def test_up_ends_with_1_and_the_name_when_a_duck_dies(model_dir):
    with _running("up", model_dir, "--ducks=2") as process:
        endpoints = process.stdout.readline().strip().partition("=")[2].split(",")
        children = _children(process.pid)
        os.kill(int(children[1]), signal.SIGKILL)
        assert process.wait(WAIT_S) == 1
        assert not any(is_running(child) for child in children)
        error = process.stderr.read()
    assert f"duck {endpoints[1]} ended with signal 9; stopped the others" in error


def test_up_that_is_killed_leaves_no_duck(model_dir):
    with _running("up", model_dir, "--ducks=2") as process:
        process.stdout.readline()
        children = _children(process.pid)
        process.kill()
        wait_until(lambda: not any(is_running(child) for child in children))


def test_up_listens_where_it_is_told_with_a_token(model_dir, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    arguments = (f"--listen-dir={tmp_path}/ducks", f"--token-file={token_file}")
    with _running("up", model_dir, "--weights=3,1", *arguments) as process:
        line = process.stdout.readline().strip()
        directory = tmp_path / "ducks"
        assert line == (
            f"VLLM_DUCK_ENDPOINTS=unix:{directory}/duck0,unix:{directory}/duck1"
        )
        endpoint = f"unix:{directory}/duck0"
        assert main(["status", endpoint]) == 1
        assert main(["status", endpoint, f"--token-file={token_file}"]) == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def test_the_line_of_up_can_be_pasted_whatever_the_directory_is_called(
    model_dir, tmp_path
):
    directory = tmp_path / "it's 100% $HOME"
    with _running("up", model_dir, f"--listen-dir={directory}") as process:
        line = process.stdout.readline().strip()
        told = subprocess.run(
            ["sh", "-c", f"{line} printenv VLLM_DUCK_ENDPOINTS"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert told == f"unix:{directory}/duck0,unix:{directory}/duck1"
        assert main(["status", *told.split(",")]) == 0
        with Fleet.connect(told.split(",")) as fleet:
            fleet.send(make_request()).wait()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--listen-dir=/tmp/a,b"], "no comma, since commas separate the endpoints"),
        (["--listen-dir=/" + "x" * 110], "at most 107 bytes, got 117"),
        (["--first-port=65535"], "port from 1 to 65535, got '127.0.0.1:65536'"),
        (["--first-port=7100", "--host=a b"], "must be host:port .*, got 'a b:7100'"),
    ],
)
def test_up_refuses_an_endpoint_before_it_loads(model_dir, capsys, arguments, match):
    assert re.search(match, _fails(capsys, "up", model_dir, "--ducks=2", *arguments))


def test_up_says_why_a_duck_cannot_start(tmp_path, capsys):
    model = make_mini_model()
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    del model.tensors[name]
    error = _fails_after_progress(capsys, "up", model.write(tmp_path))
    assert f"did not start: {tmp_path} does not list the tensor {name}" in error


def _fails_after_progress(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_plan_prints_a_plan_and_the_bytes_of_each_duck(model_dir, capsys):
    assert main(["plan", str(model_dir), "--ducks=3", "--weights=2,1,1"]) == 0
    captured = capsys.readouterr()
    plan = ShardPlan.from_json(captured.out)
    assert [shard.num_columns for shard in plan.shards] == [80, 48, 32]
    assert "duck 0: 0.2 MB, columns [0, 80) x experts [0, 4)" in captured.err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MB"), (1_540_000, "1.5 MB"), (99_000_000, "99.0 MB"), (20e9, "20.0 GB")],
)
def test_sizes_are_told_in_a_unit_that_shows_them(num_bytes, text):
    assert options.size(int(num_bytes)) == text


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vllm_duck {vllm_duck.__version__}\n"


def test_plan_takes_the_number_of_ducks_from_the_weights(model_dir, capsys):
    assert main(["plan", str(model_dir), "--weights=2,1,1"]) == 0
    assert len(ShardPlan.from_json(capsys.readouterr().out).shards) == 3


def test_status_prints_what_each_duck_holds(model_dir, tmp_path, capsys, monkeypatch):
    listen = f"unix:{tmp_path}/duck"
    with _running("serve", model_dir, "--shard=0/2", f"--listen={listen}") as process:
        process.stdout.readline()
        monkeypatch.setenv("VLLM_DUCK_ENDPOINTS", listen)
        assert main(["status"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{listen}  SERVING\n")
    for text in ("columns [0, 80)", "3: 1, 2, 3", Checkpoint(model_dir).fingerprint):
        assert text in output


def test_status_names_a_duck_that_is_slow(capsys):
    sleep_s = [0.01]

    def sleeping(request, reply_dtype):
        time.sleep(sleep_s[0])
        return echo(request, reply_dtype)

    slow = DuckServer(sleeping, make_info(), listen="127.0.0.1:0")
    slow.start()
    try:
        with serving("grpcio") as first, serving("grpcio") as second:
            endpoints = [first.endpoint, slow.endpoint, second.endpoint]

            def is_named():
                # On a slow machine its peers are slow too.
                sleep_s[0] *= 2
                assert main(["status", *endpoints]) == 0
                lines = capsys.readouterr().err.splitlines()
                return [line.split("  ")[0] for line in lines] == [slow.endpoint]

            wait_until(is_named)
    finally:
        slow.stop(0)


def test_status_of_nobody_fails_and_names_it(capsys):
    assert main(["status", "unix:/nowhere/duck"]) == 1
    assert "duck unix:/nowhere/duck cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "--shard I/N, or --plan FILE with --index I, or --columns LO:HI; got 0"),
        (["--shard=0/2", "--columns=0:16"], "in one way: .* got 2 of them"),
        (["--shard=2/2"], r"I of --shard I/N must be in \[0, 2\), got 2"),
        (["--shard=0/99"], "make at most 40 shards, got 99 ducks"),
        (["--plan=/nowhere"], "cannot read --plan /nowhere: No such file"),
        (["--columns=0:24"], "num_columns must be a positive multiple of 16, got 24"),
        (["--columns=0:320"], "a shard must lie in columns"),
        (["--shard=0/2", "--listen=0.0.0.0:0"], "opens the duck to the network"),
        (["--shard=0/2", "--listen=duck"], "an endpoint must be host:port or unix:"),
        (["--shard=0/2", "--token-file=/nowhere"], "cannot read token_file /nowhere"),
    ],
)
def test_serve_refuses_in_one_sentence(model_dir, capsys, arguments, match):
    assert re.search(match, _fails(capsys, "serve", model_dir, *arguments))


def test_serve_refuses_an_index_outside_the_plan(model_dir, tmp_path, capsys):
    plan = ShardPlan.even(2, num_columns=160, num_experts=4)
    (tmp_path / "plan").write_text(plan.to_json())
    for index in ([], ["--index=2"], ["--index=-1"]):
        error = _fails(capsys, "serve", model_dir, f"--plan={tmp_path}/plan", *index)
        assert "--index must be in [0, 2), got" in error


def test_a_plan_of_another_model_is_refused_with_both_sizes(
    model_dir, tmp_path, capsys
):
    plan = ShardPlan.even(2, num_columns=2048, num_experts=256)
    (tmp_path / "plan").write_text(plan.to_json())
    error = _fails(capsys, "up", model_dir, f"--plan={tmp_path}/plan")
    assert "is for 2048 columns and 256 experts, the model has 160 and 4" in error


def test_up_refuses_a_plan_with_a_split(model_dir, capsys):
    error = _fails(capsys, "up", model_dir, "--plan=plan", "--ducks=2")
    assert "--plan already says how many ducks there are" in error


def test_a_number_of_ducks_that_contradicts_the_weights_is_refused(model_dir, capsys):
    error = _fails(capsys, "plan", model_dir, "--ducks=2", "--weights=1,1,1")
    assert "weights must be 2 positive numbers" in error


def test_status_without_endpoints_is_refused(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_DUCK_ENDPOINTS", raising=False)
    assert "name an endpoint, or set VLLM_DUCK_ENDPOINTS" in _fails(capsys, "status")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["serve", "m", "--shard=2"], "must be I/N, as in 0/2, got '2'"),
        (["serve", "m", "--columns=2"], "must be LO:HI, got '2'"),
        (["up", "m", "--ducks=0"], "must be at least 1, got 0"),
        (["fly"], "invalid choice: 'fly'"),
    ],
)
def test_options_that_cannot_be_read_are_usage_errors(capsys, arguments, match):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["up"], ["plan"], ["status"], ["doctor"]]
)
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    assert re.search(r"vllm-duck \w+ ", capsys.readouterr().out)


@pytest.fixture(autouse=True)
def _keep_signal_handlers():
    """A command may take over signals, a test run may not."""
    before = [(number, signal.getsignal(number)) for number in HANDLED]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before:
        signal.signal(number, handler)
