"""`vllm-duck trace`: what it writes about the lanes of a step."""

import json

import pytest
from PIL import Image

from vllm_duck.cli import main
from vllm_duck.cli.gantt import chrome_trace, draw_step, spans
from vllm_duck.executor.duck import CallTimes
from vllm_duck.spec_decode.lanes.times import LaneTimes, Stages, StepRecord

US = 1000


def _make_record():
    """Two lanes, two layers; stage 0 takes 100 us, the ducks 90."""
    lanes = []
    for lane_idx in range(2):
        lane = LaneTimes()
        for layer in range(2):
            begin = (2 * layer + lane_idx) * 100 * US
            sent, end = begin + 80 * US, begin + 100 * US
            wait = (2 * layer + lane_idx + 2) * 100 * US
            call = CallTimes(sent, 90, 60, 30)
            lane.stages.append(Stages(begin, end, wait, wait + 2 * US, call))
        lanes.append(lane)
    return StepRecord(tuple(lanes), None)


def test_a_span_is_of_a_kind_a_lane_and_a_layer():
    step = list(spans(_make_record(), first_layer_idx=3))
    assert len(step) == 2 * 2 * 3
    (ducks,) = [s for s in step if s[:3] == ("ducks", 1, 4)]
    assert (ducks.begin_ns, ducks.end_ns) == (380 * US, 470 * US)


def test_a_dense_layer_has_no_span_of_the_ducks():
    record = _make_record()
    for lane in record.lanes:
        lane.stages[1] = lane.stages[1]._replace(call=None)
    kinds = [(s.kind, s.layer_idx) for s in spans(record, first_layer_idx=3)]
    assert ("host", 4) in kinds
    assert ("ducks", 3) in kinds
    assert ("ducks", 4) not in kinds


def test_the_trace_has_a_track_for_each_side_of_each_lane():
    trace = chrome_trace([_make_record()] * 2, first_layer_idx=3)
    json.dumps(trace)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 2 * 12
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert min(e["ts"] for e in events) == 0
    assert {e["name"] for e in events if e["pid"] == 1} == {"ducks 3", "ducks 4"}


def test_the_picture_shows_the_lanes(tmp_path):
    path = tmp_path / "lanes.png"
    draw_step(_make_record(), 3, path, "a step")
    with Image.open(path) as image:
        colors = {color for _, color in image.getcolors(1 << 20)}
    # The host's and the ducks' spans of both lanes.
    assert {(59, 111, 182), (200, 118, 58)} <= colors
    assert {(157, 188, 227), (239, 195, 160)} <= colors


def test_the_ducks_secret_can_be_given(tmp_path, capsys):
    """As at `status`: it must exist, which is found before any engine starts."""
    command = ["trace", str(tmp_path), "--token-file", str(tmp_path / "none")]
    assert main(command) == 1
    assert f"{tmp_path}/none" in capsys.readouterr().err


def test_no_steps_are_refused(capsys):
    assert main(["trace", "anything", "--steps", "0"]) == 1
    assert "--steps must be >= 1, got 0" in capsys.readouterr().err


@pytest.mark.vllm
def test_the_command_traces_a_model(engines, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", str(tiny_model), "--steps", "3"]) == 0
    assert "olap pair=" in capsys.readouterr().out
    trace = json.loads((tmp_path / "trace.json").read_text())
    steps = {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert steps == {0, 1, 2}
    assert (tmp_path / "lanes.png").stat().st_size > 1000
