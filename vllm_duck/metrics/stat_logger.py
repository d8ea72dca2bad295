"""Duck's figures in vLLM's log and in /metrics: a plugin of `vllm.stat_logger_plugins`.

With duck off it does nothing.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_duck.config import HandOver, is_duck_engine
from vllm_duck.metrics.figures import FiguresFile
from vllm_duck.spec_decode.draft_meter import DraftSums
from vllm_duck.spec_decode.lanes.times import Overlap

logger = init_logger(__name__)

_PREFIX = "vllm_duck:"
# Field of Overlap, metric, what it counts.
_SUMS = (
    ("num_steps", "overlapped_steps", "Steps that ran in lanes."),
    ("pair_s", "pair_seconds", "Time of the layers with ducks, over steps in lanes."),
    (
        "s0_s",
        "stage0_seconds",
        "Host time of the layers with ducks, over steps in lanes.",
    ),
    ("s1_s", "stage1_seconds", "Kernel and network time of the ducks."),
    (
        "ideal_s",
        "ideal_seconds",
        "Time of the layers with ducks if the overlap were perfect.",
    ),
)
# Field of DraftSums, metric, what it counts.
_DRAFT_SUMS = (
    ("scheduled", "drafts", "Drafts that got rows in a step."),
    ("accepted", "accepted_drafts", "Drafts that were accepted."),
    ("mtp_s", "mtp_seconds", "Time of the MTP layer's runs that draw these drafts."),
)
_ROUND_TRIP = "Time from sending a request to its reply"
# Field of DuckStatistics, metric, what it measures; of the latest calls.
_DUCK_TIMES = (
    ("rtt_us", "round_trip_seconds", f"{_ROUND_TRIP}, median"),
    ("rtt_p99_us", "round_trip_p99_seconds", f"{_ROUND_TRIP}, 99th percentile"),
    ("compute_us", "compute_seconds", "Time in the duck's kernel, median"),
    ("queue_us", "queue_seconds", "Time in the duck's queue, median"),
)


class DuckStatLogger(StatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._file: FiguresFile | None = None
        self._logged = Overlap()
        self._logged_drafts: DraftSums | None = None
        if is_duck_engine(vllm_config):
            self._file = FiguresFile(HandOver.of(vllm_config).figures_file)
            REGISTRY.register(_Collector(self._file))

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the worker writes the figures."""

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        """A line about the lanes since the last one, and one about drafts, if any."""
        figures = self._file.read() if self._file else None
        if figures is None:
            return
        total = Overlap.from_figures(figures["overlap"])
        latest, self._logged = total - self._logged, total
        if latest.num_steps:
            logger.info("%s", latest)
        if "drafts" in figures:
            self._log_drafts(DraftSums.from_figures(figures["drafts"]))

    def _log_drafts(self, total: DraftSums) -> None:
        before = self._logged_drafts or DraftSums.nothing(len(total.scheduled))
        latest, self._logged_drafts = total - before, total
        if any(latest.scheduled):
            logger.info("%s", latest)


class _Collector:
    """Reads the figures when /metrics is asked for."""

    def __init__(self, file: FiguresFile) -> None:
        self._file = file

    def collect(self) -> Iterator[Metric]:
        figures = self._file.read()
        if figures is None:
            return
        overlap = figures["overlap"]
        for field, name, text in _SUMS:
            yield CounterMetricFamily(_PREFIX + name, text, value=overlap[field])
        waits = CounterMetricFamily(
            _PREFIX + "wait_seconds",
            "Time that the host waited for the ducks.",
            labels=["lane"],
        )
        for lane_idx, seconds in enumerate(overlap["wait_s"]):
            waits.add_metric([str(lane_idx)], seconds)
        yield waits
        serial = CounterMetricFamily(
            _PREFIX + "serial_steps", "Steps that ran in one lane.", labels=["reason"]
        )
        for reason, count in figures["serial_steps"].items():
            serial.add_metric([reason], count)
        yield serial
        if "drafts" in figures:
            yield from _of_drafts(figures["drafts"])
        yield from _of_ducks(figures["ducks"])


def _of_drafts(drafts: dict[str, Any]) -> Iterator[Metric]:
    for field, name, text in _DRAFT_SUMS:
        sums = CounterMetricFamily(_PREFIX + name, text, labels=["depth"])
        for depth, value in enumerate(drafts[field], 1):
            sums.add_metric([str(depth)], value)
        yield sums
    yield CounterMetricFamily(
        _PREFIX + "verify_seconds",
        "Time of decode steps up to their tokens.",
        value=drafts["step_s"],
    )


def _of_ducks(ducks: list[dict[str, Any]]) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        _PREFIX + "duck_calls", "Calls that the duck answered.", labels=["duck"]
    )
    for duck in ducks:
        calls.add_metric([duck["name"]], duck["num_calls"])
    yield calls
    for field, name, text in _DUCK_TIMES:
        times = GaugeMetricFamily(
            f"{_PREFIX}duck_{name}",
            f"{text} of the latest calls.",
            labels=["duck"],
        )
        for duck in ducks:
            times.add_metric([duck["name"]], duck[field] / 1e6)
        yield times
    slow = GaugeMetricFamily(
        f"{_PREFIX}duck_is_slow",
        "1 for a duck that is slow against its peers (docs/reliability.md).",
        labels=["duck"],
    )
    for duck in ducks:
        slow.add_metric([duck["name"]], duck["is_slow"])
    yield slow
