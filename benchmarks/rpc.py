"""The wire alone: raw TCP frames, the native stream and grpcio, in turns.

One process is the host, pinned to one cpu as vLLM pins its worker; another, on the
other cpus, has N ducks that send the hidden rows back at once. All three do the same
job: one request to N ducks, N replies, their sum in float32. Raw TCP is C++ with epoll
(peers/raw_tcp.cpp), without HTTP/2, protobuf or checksums; grpcio is at both ends of
its case. A call is one request to one duck; host CPU is that of the whole process.

With TLS the native stream is beside itself without, and beside the raw frames over
OpenSSL's own sockets (peers/raw_tls.cpp).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.common import Result, main
from benchmarks.peers import raw_tcp
from benchmarks.peers.raw_tcp import RawFanOut
from testing.ducks.certificates import Authority, Certificate, have_openssl
from vllm_duck.executor.duck import MoeRequest
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.system.cpus import set_thread_cpus, thread_cpus
from vllm_duck.executor.transports import choose_transport

HIDDEN_SIZE = 7168
NUM_TOPK = 8
NUM_LAYERS, NUM_LANES, NUM_DUCKS = 58, 2, 32
# Turns in which the three alternate: what disturbs the machine disturbs all of them.
NUM_TURNS = 7
IDLE_S = 3.0

Call = Callable[[], object]


def run(quick: bool) -> Iterator[Result]:
    cpus = sorted(thread_cpus())
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(_serving(kind, set(cpus[1:] or cpus)))
            for kind in ("raw", "native", "grpcio")
        }
        # grpcio's threads of a host may use every cpu; the caller has one.
        set_thread_cpus({cpus[0]})
        num_calls = 60 if quick else 600
        for num_ducks in (1, 4, 8, 32):
            yield from _small(servers, num_ducks, num_calls)
        yield from _large(servers, 70, 100 if quick else 400)
        yield from _large(servers, 2093, 8 if quick else 30)
        yield from _step(servers)
        yield from _lanes(servers, num_calls)
        yield from _idle(servers)
    yield from _tls(quick, cpus)


def _tls(quick: bool, cpus: list[int]) -> Iterator[Result]:
    """What encrypting costs the host."""
    if not (
        have_openssl()
        and choose_transport("auto", has_tls=True).transport.name == "native"
    ):
        print("TLS: left out, the stream is built without, or no openssl command")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificate = Authority(folder).sign("duck")
        servers = {
            kind: stack.enter_context(
                _serving(kind, set(cpus[1:] or cpus), certificate)
            )
            for kind in ("native", "native_tls", "raw_tls")
        }
        for num_ducks, num_rows, num_calls in (
            (1, 1, 60 if quick else 600),
            (8, 1, 60 if quick else 600),
            (32, 1, 60 if quick else 600),
            (1, 70, 100 if quick else 400),
            (1, 2093, 8 if quick else 30),
        ):
            figures = _measure(servers, num_ducks, num_rows, num_calls)
            size_mb = round(num_rows * HIDDEN_SIZE * 2 / 1e6)
            size = f"{size_mb}MB" if size_mb else "14KB"
            case = f"native with TLS N={num_ducks} {size}"
            ours = figures["native_tls"][1]
            for kind, peer, target in (
                ("native", "native without", "2x"),
                ("raw_tls", "raw OpenSSL", ""),
            ):
                cpu_us = figures[kind][1]
                yield Result(
                    case, "host_cpu_us_per_call", ours, "us", peer, cpu_us, target
                )


def _small(servers: dict[str, "_Server"], num_ducks: int, num_calls: int) -> Iterator:
    figures = _measure(servers, num_ducks, 1, num_calls)
    case = f"native N={num_ducks} 14KB"
    rtt_us, cpu_us = figures["native"]
    raw_rtt_us, raw_cpu_us = figures["raw"]
    yield Result(case, "rtt_p50_us", rtt_us, "us", "raw TCP", raw_rtt_us, "1.25x")
    yield Result(
        case, "host_cpu_us_per_call", cpu_us, "us", "raw TCP", raw_cpu_us, "1.3x"
    )
    grpcio_rtt_us, grpcio_cpu_us = figures["grpcio"]
    yield Result(case, "rtt_p50_us", rtt_us, "us", "grpcio", grpcio_rtt_us)
    yield Result(
        case, "host_cpu_us_per_call", cpu_us, "us", "grpcio", grpcio_cpu_us, "1/8"
    )


def _large(servers: dict[str, "_Server"], num_rows: int, num_calls: int) -> Iterator:
    figures = _measure(servers, 1, num_rows, num_calls)
    size_mb = round(num_rows * HIDDEN_SIZE * 2 / 1e6)
    target = "1.3x" if size_mb < 10 else "1.8x"
    case = f"native N=1 {size_mb}MB"
    for peer, name in (("raw", "raw TCP"), ("grpcio", "grpcio")):
        yield Result(
            case,
            "rtt_p50_us",
            figures["native"][0],
            "us",
            name,
            figures[peer][0],
            target if peer == "raw" else "",
        )


def _step(servers: dict[str, "_Server"]) -> Iterator[Result]:
    """A decode step of the real model: every layer, two lanes, one after the other."""
    calls_a_step = NUM_LAYERS * NUM_LANES
    wall_ms: dict[str, list[float]] = {kind: [] for kind in servers}
    cpu_ms: dict[str, list[float]] = {kind: [] for kind in servers}
    with ExitStack() as stack:
        calls = {
            kind: stack.enter_context(server.calling(NUM_DUCKS, _request(1)))
            for kind, server in servers.items()
        }
        for _ in range(NUM_TURNS):
            for kind, call in calls.items():
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                for _ in range(calls_a_step):
                    call()
                wall_ms[kind].append(1000 * (time.perf_counter() - wall_s))
                cpu_ms[kind].append(1000 * (time.process_time() - cpu_s))
    case = f"native step, {calls_a_step * NUM_DUCKS} calls"
    for metric, values, target in (
        ("host_cpu_ms", cpu_ms, "30 ms"),
        ("wall_ms", wall_ms, ""),
    ):
        median = {kind: float(np.median(values[kind])) for kind in values}
        yield Result(
            case, metric, median["native"], "ms", "raw TCP", median["raw"], target
        )
        yield Result(case, metric, median["native"], "ms", "grpcio", median["grpcio"])


def _lanes(servers: dict[str, "_Server"], num_calls: int) -> Iterator[Result]:
    """Two requests in flight at once against one after the other."""
    requests = [_request(1, seed) for seed in range(2)]
    at_once_us, in_turn_us = [], []
    with servers["native"].fleet(8) as fleet:
        for _ in range(NUM_TURNS * num_calls // 4):
            start = time.perf_counter_ns()
            pendings = [fleet.send(request) for request in requests]
            for pending in pendings:
                pending.wait()
            middle = time.perf_counter_ns()
            for request in requests:
                fleet.send(request).wait()
            end = time.perf_counter_ns()
            at_once_us.append((middle - start) / 1000)
            in_turn_us.append((end - middle) / 1000)
    yield Result(
        "native N=8 14KB, two lanes at once",
        "wall_p50_us",
        float(np.median(at_once_us)),
        "us",
        "in turn",
        float(np.median(in_turn_us)),
    )


def _idle(servers: dict[str, "_Server"]) -> Iterator[Result]:
    """CPU of both ends with 32 streams open and no call, in percent of a core."""
    for kind in ("native", "grpcio"):
        server = servers[kind]
        with server.calling(NUM_DUCKS, _request(1)) as call:
            call()
            time.sleep(0.2)
            host_s, duck_s = time.process_time(), server.cpu_s()
            time.sleep(IDLE_S)
            host_s, duck_s = time.process_time() - host_s, server.cpu_s() - duck_s
        target = "0.5 %" if kind == "native" else ""
        for end, busy_s in (("host", host_s), ("duck", duck_s)):
            percent = 100 * busy_s / IDLE_S
            yield Result(f"{kind} idle, {end}", "cpu", percent, "%", target=target)


def _measure(
    servers: dict[str, "_Server"], num_ducks: int, num_rows: int, num_calls: int
) -> dict[str, tuple[float, float]]:
    """Median microseconds of a fan-out, and of host CPU a call, for each kind."""
    request = _request(num_rows)
    rtts_us: dict[str, list[float]] = {kind: [] for kind in servers}
    cpu_us: dict[str, list[float]] = {kind: [] for kind in servers}
    with ExitStack() as stack:
        calls = {
            kind: stack.enter_context(server.calling(num_ducks, request))
            for kind, server in servers.items()
        }
        for call in calls.values():
            for _ in range(5):
                call()
        for _ in range(NUM_TURNS):
            for kind, call in calls.items():
                cpu_s = time.process_time()
                rtts_us[kind] += _rtts_us(call, num_calls)
                passed_s = time.process_time() - cpu_s
                cpu_us[kind].append(1e6 * passed_s / num_calls / num_ducks)
    return {
        kind: (float(np.median(rtts_us[kind])), float(np.median(cpu_us[kind])))
        for kind in servers
    }


def _rtts_us(call: Call, num_calls: int) -> list[float]:
    rtts_us = []
    for _ in range(num_calls):
        start_ns = time.perf_counter_ns()
        call()
        rtts_us.append((time.perf_counter_ns() - start_ns) / 1000)
    return rtts_us


def _request(num_rows: int, seed: int = 0) -> MoeRequest:
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((num_rows, HIDDEN_SIZE), dtype=np.float32)
    return MoeRequest(
        layer_idx=3,
        # The upper half of a float32 is a bf16.
        hidden=(hidden.view(np.uint32) >> 16).astype(np.uint16),
        topk_ids=rng.integers(0, 256, (num_rows, NUM_TOPK), np.int32),
        topk_weights=rng.random((num_rows, NUM_TOPK), np.float32),
    )


class _Server:
    """A process with ducks of one kind."""

    def __init__(
        self,
        kind: str,
        process: "subprocess.Popen[str]",
        certificate: Certificate | None,
    ) -> None:
        assert process.stdout is not None
        self._security = certificate.client() if kind == "native_tls" else None
        self._kind = kind
        self._process = process
        self._port = int(process.stdout.readline())

    @contextmanager
    def calling(self, num_ducks: int, request: MoeRequest) -> Iterator[Call]:
        """A function that makes one fan-out."""
        if self._kind.startswith("raw"):
            data = np.concatenate(
                [
                    part.reshape(-1).view(np.uint8)
                    for part in (
                        request.hidden,
                        request.topk_ids,
                        request.topk_weights,
                    )
                ]
            )
            library = raw_tcp.load_tcp() if self._kind == "raw" else raw_tcp.load_tls()
            raw = RawFanOut(library, ["127.0.0.1"] * num_ducks, self._port)
            yield lambda: raw.call(data, request.hidden.shape)
            raw.close()
            return
        with self.fleet(num_ducks) as fleet:
            yield lambda: fleet.send(request).wait().total

    @contextmanager
    def fleet(self, num_ducks: int) -> Iterator[Fleet]:
        """The ducks, which are N times the same one, so they are not checked."""
        endpoints = [f"localhost:{self._port}"] * num_ducks
        with patch("vllm_duck.executor.fleet.check_tiling"):
            fleet = Fleet.connect(
                endpoints, transport=self._transport, security=self._security
            )
        with fleet:
            yield fleet

    @property
    def _transport(self) -> Any:
        return self._kind.removesuffix("_tls")

    def cpu_s(self) -> float:
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _serving(
    kind: str, cpus: set[int], certificate: Certificate | None = None
) -> Iterator[_Server]:
    """certificate: of the kinds with TLS."""
    files = ",".join(astuple(certificate)) if certificate else ""
    command = [sys.executable, "-m", "benchmarks.rpc", "--serve", kind, files]
    process = subprocess.Popen(
        [*command, *map(str, cpus)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield _Server(kind, process, certificate)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _serve(kind: str, files: str, cpus: set[int]) -> None:
    """Be the ducks: print the port and serve until killed."""
    set_thread_cpus(cpus)
    certificate = Certificate(*files.split(",")) if files else None
    if kind == "raw":
        raw_tcp.load_tcp().raw_serve(b"127.0.0.1")
    if kind == "raw_tls":
        assert certificate is not None
        pair = (certificate.cert.encode(), certificate.key.encode())
        raw_tcp.load_tls().raw_serve(*pair)
    from testing.ducks.wire_peers import serving

    security = certificate.server() if certificate and kind == "native_tls" else None
    with serving(kind.removesuffix("_tls"), security=security) as server:
        print(server.endpoint.rpartition(":")[2], flush=True)
        time.sleep(86400)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2], sys.argv[3], {int(cpu) for cpu in sys.argv[4:]})
    else:
        main("rpc", run, __doc__)
