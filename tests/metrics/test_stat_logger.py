"""Figures on their way from the worker to the log and to /metrics."""

import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.worker.cpu_worker import CPUWorker

from testing.waiting import wait_until
from vllm_duck.config import HAND_OVER_KEY, HandOver
from vllm_duck.cpu_worker import CpuDuckWorker
from vllm_duck.metrics import stat_logger
from vllm_duck.metrics.figures import FiguresFile, FiguresWriter, temporary_folder
from vllm_duck.metrics.stat_logger import DuckStatLogger
from vllm_duck.spec_decode.lanes.times import Overlap

STEPS = {
    "overlap": {
        "num_steps": 10,
        "pair_s": 1.0,
        "s0_s": 0.9,
        "s1_s": 0.8,
        "ideal_s": 0.95,
        "wait_s": [0.06, 0.04],
    },
    "serial_steps": {"one token": 3},
    "ducks": [
        {
            "name": "unix:/a",
            "num_calls": 40,
            "rtt_us": 200.0,
            "compute_us": 150.0,
            "queue_us": 10.0,
            "rtt_p99_us": 900.0,
            "is_slow": True,
        }
    ],
}


DRAFTS = {
    "scheduled": [10, 4, 0],
    "accepted": [8, 3, 0],
    "mtp_s": [0.3, 0.1, 0.0],
    "step_s": 3.6,
}


@pytest.fixture
def path():
    return f"{temporary_folder()}/figures.json"


@pytest.fixture
def duck_logger(path):
    hand_over = HandOver(kv_dtype="fp8", figures_file=str(path), health_file="")
    settings = {"duck": {}, HAND_OVER_KEY: asdict(hand_over)}
    before = set(REGISTRY._collector_to_names)
    yield DuckStatLogger(SimpleNamespace(additional_config=settings))
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_metrics_show_what_the_worker_wrote(path, duck_logger):
    assert b"vllm_duck:" not in generate_latest(REGISTRY)
    FiguresFile(path).write(STEPS)
    text = generate_latest(REGISTRY).decode()
    assert "vllm_duck:overlapped_steps_total 10.0" in text
    assert 'vllm_duck:wait_seconds_total{lane="1"} 0.04' in text
    assert 'vllm_duck:serial_steps_total{reason="one token"} 3.0' in text
    assert 'vllm_duck:duck_calls_total{duck="unix:/a"} 40.0' in text
    assert 'vllm_duck:duck_compute_seconds{duck="unix:/a"} 0.00015' in text
    assert 'vllm_duck:duck_round_trip_p99_seconds{duck="unix:/a"} 0.0009' in text
    assert 'vllm_duck:duck_is_slow{duck="unix:/a"} 1.0' in text


def test_metrics_show_drafts_by_depth(path, duck_logger):
    FiguresFile(path).write({**STEPS, "drafts": DRAFTS})
    text = generate_latest(REGISTRY).decode()
    assert 'vllm_duck:drafts_total{depth="1"} 10.0' in text
    assert 'vllm_duck:accepted_drafts_total{depth="2"} 3.0' in text
    assert 'vllm_duck:mtp_seconds_total{depth="1"} 0.3' in text
    assert "vllm_duck:verify_seconds_total 3.6" in text


def test_the_log_tells_of_drafts_since_the_last_line(path, duck_logger, monkeypatch):
    lines = []
    monkeypatch.setattr(
        stat_logger.logger, "info", lambda text, *args: lines.append(text % args)
    )
    for scheduled in ([10, 4, 0], [10, 4, 0], [12, 4, 0]):
        accepted = [scheduled[0] - 2, 3, 0]
        drafts = {**DRAFTS, "scheduled": scheduled, "accepted": accepted}
        FiguresFile(path).write({**STEPS, "drafts": drafts})
        duck_logger.log()
    assert lines[1:] == [
        "drafts accepted=0.80/0.75 of=10/4 mtp=0.100",
        "drafts accepted=1.00 of=2 mtp=0.000",
    ]


def test_the_log_tells_of_the_steps_since_the_last_line(path, duck_logger, monkeypatch):
    lines = []
    monkeypatch.setattr(
        stat_logger.logger, "info", lambda text, *args: lines.append(text % args)
    )
    duck_logger.log()
    FiguresFile(path).write(STEPS)
    duck_logger.log()
    duck_logger.log()
    more = {**STEPS, "overlap": {**STEPS["overlap"], "num_steps": 12, "pair_s": 1.3}}
    FiguresFile(path).write(more)
    duck_logger.log()
    first, second = lines
    assert first == (
        "olap pair=100.00ms serial=170.00ms gain=70.00ms ratio=0.412 s0=90.00 "
        "s1=80.00 wait=6.00/4.00 efficiency=0.93 steps=10"
    )
    assert "pair=150.00ms" in second
    assert "steps=2" in second


def test_the_last_step_before_a_pause_is_written_too(path):
    collected = []

    def collect():
        collected.append(num_steps)
        return {"num_steps": num_steps}

    writer = FiguresWriter(path, collect)
    begin_s = time.monotonic()
    for num_steps in range(1, 101):  # noqa: B007
        writer.step_done()
        time.sleep(0.002)
    wait_until(lambda: FiguresFile(path).read() == {"num_steps": 100})
    # At most twice a second.
    assert len(collected) <= 2 + 2 * (time.monotonic() - begin_s)
    writer.stop()


def test_figures_that_cannot_be_written_do_not_end_the_engine(tmp_path, caplog):
    path = tmp_path / "gone" / "figures.json"
    writer = FiguresWriter(path, lambda: STEPS)
    writer.step_done()
    wait_until(lambda: "no figures" in caplog.text)
    writer.step_done()
    writer.stop()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert FiguresFile(path).read() is None


def test_no_figures_are_collected_once_the_worker_shuts_down(path, monkeypatch):
    worker, is_model_gone = object.__new__(CpuDuckWorker), []

    def collect():
        assert not is_model_gone
        return STEPS

    def shut_down(self):
        is_model_gone.append(True)
        self.figures_writer.step_done()

    monkeypatch.setattr(CPUWorker, "shutdown", shut_down)
    worker.figures_writer = FiguresWriter(path, collect)
    worker.figures_writer.step_done()
    worker.shutdown()
    assert "duck-figures" not in [thread.name for thread in threading.enumerate()]


def test_without_ducks_it_adds_nothing():
    before = set(REGISTRY._collector_to_names)
    stock = DuckStatLogger(SimpleNamespace(additional_config={}))
    stock.log()
    assert set(REGISTRY._collector_to_names) == before


def test_a_step_s_share_is_of_what_could_be_saved():
    assert str(Overlap()) == "olap no step ran in lanes"
    half = Overlap(1, pair_s=1.5, s0_s=1.0, s1_s=1.0, ideal_s=1.0)
    assert (half.ratio, half.efficiency) == (0.25, 0.5)
