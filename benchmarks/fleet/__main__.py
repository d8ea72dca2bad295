"""A decode step of a whole fleet: 58 layers, rows of 7,168, two lanes, N paced ducks.

Lanes, schedule and native stream are the host's own; its stage 0 is paced as a GPU's
(c for each lane of a layer), during which the thread is free. The ducks answer after d
and their row's way over the wire; one thread on a cpu of its own is all of them. Each
is behind a link of its own in a network namespace (needs root). The links are shaped to
2.5 Gb/s, but let bursts of 64 KB pass, as rows of a step are: hence the row's way in
the ducks' time. Both sides share this machine: where a cpu is busy for more than 80 %
of the time (`busy`, of the busiest), the case is void, and says so.

overhead_ms: of a row alone that the ducks answer at once, from before it is sent until
the sum is there; the peer is a raw TCP fan-out over the same links. predicted_ratio:
the step over what `vllm_duck.plan` predicts of c, d and the wire, with the constants
that it has for everybody.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import MODEL_DIR, Result, main
from benchmarks.fleet.ducks import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    Pace,
    PacedDucks,
    compiled_ducks,
    paced_ducks,
)
from benchmarks.fleet.host import Host, SocketWork, one_row
from benchmarks.peers.raw_tcp import RawFanOut, load_tcp, raw_server
from testing.network.far_host import RATE_MBIT, far_host
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.system.cpus import set_thread_cpus, thread_cpus
from vllm_duck.plan import machines
from vllm_duck.plan.sizes import FP8_BYTES, read_sizes
from vllm_duck.plan.steps import Planner, Stages
from vllm_duck.spec_decode.lanes.times import StepRecord

# A row with its choice of experts on a 2.5 Gb/s link, one way.
WIRE_S = (2 * HIDDEN_SIZE + 64) / (RATE_MBIT * 1e6 / 8 * machines.WIRE_SHARE)
# c and d of a lane in a layer, ms. The first are what a 32-duck engine on N100 and an
# RTX 5090 took, by its builder.
STAGES = ((0.71, 0.80), (0.3, 0.8), (0.5, 0.5), (1.0, 0.5), (0.4, 1.6), (1.0, 1.0))
MOST_BUSY = 0.8


@dataclass(frozen=True)
class Case:
    num_ducks: int
    c_s: float
    d_s: float

    def __str__(self) -> str:
        c_ms, d_ms = self.c_s * 1e3, self.d_s * 1e3
        return f"N={self.num_ducks} c={c_ms:.2f} d={d_ms:.2f}"


@dataclass(frozen=True)
class Measured:
    """Medians of steps with a draft."""

    step_s: float
    efficiency: float
    host_cpu_s: float
    ducks_cpu_s: float
    # Of the step's 116 lane-layers.
    work: SocketWork
    busy: float


def run(quick: bool) -> Iterator[Result]:
    with compiled_ducks() as library:
        yield from _fleets(library, quick)


def _fleets(library: Path, quick: bool) -> Iterator[Result]:
    num_steps = 10 if quick else 40
    for num_ducks in (8, 32) if quick else (8, 16, 32, 64):
        with ExitStack() as stack:
            far = stack.enter_context(far_host(num_ducks))
            ducks = stack.enter_context(paced_ducks(library, far.addresses, far.inside))
            raw_port = stack.enter_context(raw_server(far.inside))
            set_thread_cpus(sorted(thread_cpus())[:-1] or thread_cpus())
            fleet = stack.enter_context(
                Fleet.connect(ducks.endpoints, transport="native")
            )
            raw = RawFanOut(load_tcp(), far.addresses, raw_port)
            stack.callback(raw.close)
            host = Host(fleet)
            yield from _alone(host, ducks, raw, num_ducks, 20 * num_steps)
            for c_ms, d_ms in STAGES[: 2 if quick else None]:
                case = Case(num_ducks, c_ms / 1e3, d_ms / 1e3)
                yield from _results(case, _measure(case, host, ducks, num_steps))


def _alone(
    host: Host, ducks: PacedDucks, raw: RawFanOut, num_ducks: int, num_calls: int
) -> Iterator[Result]:
    """One lane's row at a time, ours and raw TCP by turns."""
    ducks.set_pace(Pace(0.0))
    request = one_row()
    data = np.zeros(2 * HIDDEN_SIZE + 64, np.uint8)
    ours_s, raw_s = [], []
    for _ in range(num_calls):
        begin_s = time.perf_counter()
        host.ducks.send(request).wait()
        middle_s = time.perf_counter()
        raw.call(data, (1, HIDDEN_SIZE))
        ours_s.append(middle_s - begin_s)
        raw_s.append(time.perf_counter() - middle_s)
    case, ours, peer = f"N={num_ducks}", median(ours_s), median(raw_s)
    yield Result(case, "overhead_ms", ours * 1e3, "ms", "raw TCP", peer * 1e3)
    yield Result(case, "overhead_ratio", ours / peer, "", target="<= 1.25 at N=32")


def _measure(case: Case, host: Host, ducks: PacedDucks, num_steps: int) -> Measured:
    ducks.set_pace(Pace(case.d_s, wire_s=2 * WIRE_S))
    host.gpu.stage_s = case.c_s
    for _ in range(3):
        host.step(2)
    host.work = SocketWork()
    host_before_s, ducks_before_s = time.process_time(), ducks.cpu_s()
    cpus_before = _cpu_times()
    records = [host.step(2) for _ in range(num_steps)]
    busy, idle = _cpu_times() - cpus_before
    host_s = time.process_time() - host_before_s
    ducks_s = ducks.cpu_s() - ducks_before_s
    return Measured(
        median(record.seconds for record in records),
        median(_efficiency(record, case.c_s) for record in records),
        host_s / num_steps,
        ducks_s / num_steps,
        host.work.over(num_steps * 2 * NUM_LAYERS),
        float(np.max(busy / (busy + idle))),
    )


def _efficiency(record: StepRecord, c_s: float) -> float:
    """As docs/lanes.md has it, of a stage 0 that is paced."""
    stages = [stage for lane in record.lanes for stage in lane.stages]
    calls = [stage.call for stage in stages if stage.call is not None]
    link_us = min(call.link_us for call in calls)
    s0_s = c_s * len(calls)
    s1_s = sum(call.compute_us + link_us for call in calls) / 1e6
    ideal_s = max(s0_s, s1_s) + min(s0_s, s1_s) / len(calls)
    return (s0_s + s1_s - record.seconds) / (s0_s + s1_s - ideal_s)


def planned_s(case: Case) -> float:
    """The step by the planner's constants."""
    fleet = machines.Fleet(case.num_ducks, 25.0, 192.0, RATE_MBIT / 1e3, 0.0)
    gpu = machines.GPUS["rtx5090"]
    planner = Planner(read_sizes(MODEL_DIR), gpu, fleet, FP8_BYTES, FP8_BYTES, 0.87)
    calls_s = machines.CALL_S * case.num_ducks
    lane = Stages(case.c_s, calls_s, WIRE_S, case.d_s, WIRE_S, machines.ROUND_TRIP_S)
    return NUM_LAYERS * planner.lanes_s(lane, lane)


def _results(case: Case, found: Measured) -> Iterator[Result]:
    name = str(case)
    if found.busy > MOST_BUSY:
        name += " (void: busy)"
    ratio = found.step_s / planned_s(case)
    work = found.work
    yield Result(name, "step_ms", found.step_s * 1e3, "ms")
    yield Result(name, "predicted_ratio", ratio, "", target="0.85 to 1.15")
    yield Result(name, "efficiency", found.efficiency, "", target=">= 0.9")
    yield Result(name, "host_cpu_ms_per_step", found.host_cpu_s * 1e3, "ms")
    yield Result(name, "ducks_cpu_ms_per_step", found.ducks_cpu_s * 1e3, "ms")
    yield Result(name, "socket_work_us", work.total_s * 1e6, "us a lane-layer")
    for part in ("send", "poll", "take"):
        yield Result(name, f"  {part}", getattr(work, f"{part}_s") * 1e6, "us")
    yield Result(name, "busy", 100 * found.busy, "%", target="<= 80 %")


def _cpu_times() -> np.ndarray:
    """[busy or idle, cpu]: clock ticks since the machine's start."""
    lines = Path("/proc/stat").read_text().splitlines()
    fields = np.array(
        [
            [int(field) for field in line.split()[1:9]]
            for line in lines
            if line.startswith("cpu") and line[3].isdigit()
        ]
    )
    # idle and iowait
    idle = fields[:, 3] + fields[:, 4]
    return np.array([fields.sum(1) - idle, idle])


if __name__ == "__main__":
    main("fleet", run, __doc__)
