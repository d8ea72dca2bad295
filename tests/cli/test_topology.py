"""`vllm-duck doctor ENDPOINT...` names what is wrong with ducks, or slow."""

import re
from contextlib import ExitStack
from dataclasses import replace

import pytest

from testing.ducks.echo import echo
from testing.ducks.mini_model import make_info
from testing.ducks.wire_peers import SERVERS, serving
from vllm_duck.cli import main, topology
from vllm_duck.cli.topology import DuckSpeed
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.grpcio.server import DuckServer
from vllm_duck.executor.wire.security import ServerSecurity

FIRST, SECOND = Shard(0, 80, 0, 4), Shard(80, 160, 0, 4)
SPEED = DuckSpeed(link_us=300, compute_us=900, gbps=2.0, read_gbs=20.0)


@pytest.fixture
def start():
    """Start a duck of a shard; its endpoint."""
    with ExitStack() as stack:

        def start(shard=FIRST, **options):
            info = replace(make_info(), shard=shard, weight_bytes=10**6)
            server = DuckServer(echo, info, listen="127.0.0.1:0", **options)
            server.start()
            stack.callback(server.stop, 0)
            return server.endpoint

        yield start


def examined(capsys, *arguments):
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


def test_ducks_that_fit_are_measured_and_are_well(start, capsys):
    code, report = examined(capsys, start(FIRST), start(SECOND))
    assert code == 0
    assert "2 ducks hold 2.0 MB of" in report
    assert report.count(" us, a row ") == 2
    assert re.search(r"plan MODEL --ducks 2 --duck-stage-ms \d+\.\d\d ", report)


@pytest.mark.parametrize("kind", SERVERS)
def test_a_duck_alone_is_measured(kind, capsys):
    with serving(kind) as server:
        code, report = examined(capsys, server.endpoint)
    assert code == 0
    assert f"ok     {server.endpoint}" in report


def test_a_duck_that_is_not_there_is_broken_and_the_others_are_measured(start, capsys):
    there = start(FIRST)
    code, report = examined(capsys, there, "unix:/nowhere/duck")
    assert code == 1
    assert "BROKEN unix:/nowhere/duck" in report
    assert "start `vllm-duck serve` there" in report
    assert f"ok     {there}" in report
    assert "the model" not in report


def test_ducks_that_do_not_tile_the_model_are_broken(start, capsys):
    code, report = examined(capsys, start(FIRST))
    assert code == 1
    assert "BROKEN the model" in report
    assert "80" in report


def test_a_wrong_token_is_named(start, capsys, tmp_path):
    endpoint = start(FIRST, security=ServerSecurity(token="right"))
    (tmp_path / "token").write_text("wrong")
    code, report = examined(capsys, endpoint, f"--token-file={tmp_path}/token")
    assert code == 1
    assert "refused the token" in report
    assert "correct the endpoint or the token file" in report


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"link_us": 900}, "links take 300 us: look at its cable"),
        ({"gbps": 0.9}, "the others get 2.0 Gb/s: look at the speed of its port"),
        ({"read_gbs": 9.0}, "the others read 20.0 GB/s: look for other work there"),
        ({"link_us": 400}, None),
        ({"gbps": None, "read_gbs": None}, None),
    ],
)
def test_what_is_slow_against_the_others_is_named(change, advice):
    speeds = {"a": SPEED, "b": replace(SPEED, **change), "c": SPEED}
    assert topology._advice("a", speeds) == ""
    found = topology._advice("b", speeds)
    assert advice in found if advice else found == ""


def test_one_duck_is_slow_against_nobody():
    assert topology._advice("a", {"a": SPEED}) == ""
