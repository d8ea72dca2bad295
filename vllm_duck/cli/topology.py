"""Whether ducks fit together, and what each of them and the way to it can do.

Every replica is described and timed alone, with calls of one row, as decoding sends
them, and of many, as prompts do. What is far from the others' median is named.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import numpy as np

from vllm_duck.cli import options
from vllm_duck.cli.finding import Finding, broken
from vllm_duck.endpoints import replicas_of
from vllm_duck.errors import (
    DuckError,
    DuckTimeout,
    DuckTransportError,
    DuckUnavailable,
)
from vllm_duck.executor.duck import CallTimes, DuckInfo, FanOut, MoeRequest
from vllm_duck.executor.fleet import check_ducks
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.transports import choose_transport
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.security import ClientSecurity

_TOPK = 8
# Calls of one row, and of many; a row of DeepSeek-V3.2 takes 14 KB.
_NUM_CALLS, _NUM_LARGE_CALLS, _LARGE_ROWS = 40, 4, 256
# Worse than the others' median by so much is named.
_FACTOR = 0.6
_MARGIN_US = 200.0


@dataclass(frozen=True)
class DuckSpeed:
    """Of one duck that is called alone; None: too quick to be told, or not said."""

    # Of a row: the way there and back through both ends, and the duck's compute.
    link_us: float
    compute_us: float
    # Both ways together, of large calls.
    gbps: float | None
    # Of the weights of a row's experts.
    read_gbs: float | None

    @property
    def call_us(self) -> float:
        return self.link_us + self.compute_us

    def __str__(self) -> str:
        parts = [f"link {self.link_us:.0f} us", f"a row {self.compute_us:.0f} us"]
        if self.read_gbs is not None:
            parts.append(f"{self.read_gbs:.1f} GB/s of weights")
        if self.gbps is not None:
            parts.append(f"large calls {self.gbps:.1f} Gb/s")
        return ", ".join(parts)


def check_topology(
    endpoints: Sequence[str], *, deadline_s: float, security: ClientSecurity
) -> Iterator[Finding]:
    """endpoints: as duck.endpoints has them, one a shard, replicas with | between."""
    found: dict[str, DuckInfo] = {}
    for endpoint in [each for shard in endpoints for each in replicas_of(shard)]:
        answer = _describe(endpoint, deadline_s, security)
        if isinstance(answer, Finding):
            yield answer
        else:
            found[endpoint] = answer
    yield from _check_together(endpoints, deadline_s, security)
    speeds: dict[str, DuckSpeed] = {}
    for endpoint, info in found.items():
        try:
            speeds[endpoint] = _measure(endpoint, info, deadline_s, security)
        except DuckError as error:
            yield broken(endpoint, str(error), "start this duck again, and ask again")
    for endpoint, speed in speeds.items():
        about = f"{found[endpoint].isa}, {found[endpoint].num_threads} threads"
        yield Finding(endpoint, f"{about}: {speed}", _advice(endpoint, speeds))
    if speeds:
        slowest_ms = max(speed.call_us for speed in speeds.values()) / 1e3
        command = (
            f"plan MODEL --ducks {len(endpoints)} --duck-stage-ms {slowest_ms:.2f}"
        )
        state = f"vllm-duck {command} --host NAME, or --host-gbs X"
        yield Finding("what to expect", state)


def _describe(
    endpoint: str, deadline_s: float, security: ClientSecurity
) -> DuckInfo | Finding:
    duck = GrpcDescriber(endpoint, deadline_s=deadline_s, security=security)
    try:
        return duck.describe()
    except DuckUnavailable as error:
        advice = (
            "start `vllm-duck serve` there with a --listen that this machine reaches; "
            "if the duck has TLS or this machine asks for it, both sides need it"
        )
        return broken(endpoint, str(error), advice)
    except DuckTimeout as error:
        advice = "look for a firewall that drops what comes, or a wrong address"
        return broken(endpoint, str(error), advice)
    except DuckTransportError as error:
        return broken(endpoint, str(error), "correct the endpoint or the token file")


def _check_together(
    endpoints: Sequence[str], deadline_s: float, security: ClientSecurity
) -> Iterator[Finding]:
    """Nothing to say while a whole shard does not answer; that was said."""
    describers = [
        GrpcDescriber(endpoint, deadline_s=deadline_s, security=security)
        for endpoint in endpoints
    ]
    try:
        infos = check_ducks(describers)
    except (DuckUnavailable, DuckTimeout):
        return
    except DuckError as error:
        yield broken("the model", str(error), 'see docs/ducks.md, "Split"')
        return
    held = options.size(sum(info.weight_bytes for info in infos))
    state = f"{len(infos)} ducks hold {held} of {infos[0].model_fingerprint}"
    yield Finding("the model", state)


def _measure(
    endpoint: str, info: DuckInfo, deadline_s: float, security: ClientSecurity
) -> DuckSpeed:
    choice = choose_transport("auto", has_tls=security.tls_ca is not None)
    fan_out = choice.transport.connect(
        [endpoint],
        identities=[identity_of(info)],
        deadline_s=deadline_s,
        reply_dtype="bf16",
        security=security,
        recover_s=0.0,
    )
    try:
        small = _call(fan_out, info, 1, _NUM_CALLS)
        large = _call(fan_out, info, _LARGE_ROWS, _NUM_LARGE_CALLS)
    finally:
        fan_out.close()
    compute_us = median(times.compute_us for times in small)
    link_us = median(times.link_us for times in small)
    more_us = min(times.link_us for times in large) - link_us
    num_bits = 2 * 8 * (_LARGE_ROWS - 1) * 2 * info.hidden_size
    num_held = len(info.layer_ids) * info.shard.num_experts
    read_bytes = info.weight_bytes / num_held * _num_topk(info)
    return DuckSpeed(
        link_us,
        compute_us,
        gbps=num_bits / more_us / 1e3 if more_us > 0 else None,
        read_gbs=read_bytes / compute_us / 1e3 if read_bytes and compute_us else None,
    )


def _num_topk(info: DuckInfo) -> int:
    return min(_TOPK, info.shard.num_experts)


def _call(
    fan_out: FanOut, info: DuckInfo, num_rows: int, num_calls: int
) -> list[CallTimes]:
    """Each call goes to other experts than the last, and to another layer."""
    hidden = np.zeros((num_rows, info.hidden_size), np.uint16)
    num_topk, shard = _num_topk(info), info.shard
    weights = np.ones((num_rows, num_topk), np.float32)
    chosen = np.arange(num_rows * num_topk, dtype=np.int32).reshape(num_rows, -1)
    times = []
    for index, layer_idx in zip(range(num_calls), cycle(info.layer_ids)):
        ids = (chosen + index * num_topk) % shard.num_experts + shard.expert_lo
        request = MoeRequest(layer_idx, hidden, ids.astype(np.int32), weights)
        times.append(fan_out.send(request).wait().times)
    return times


def _advice(endpoint: str, speeds: Mapping[str, DuckSpeed]) -> str:
    """What to look at on a duck that is worse than the others."""
    others = [speed for name, speed in speeds.items() if name != endpoint]
    if not others:
        return ""
    own = speeds[endpoint]
    link_us = median(each.link_us for each in others)
    advice = []
    if own.link_us > max(link_us / _FACTOR, link_us + _MARGIN_US):
        advice.append(
            f"the others' links take {link_us:.0f} us: look at its cable, switch and "
            "the power saving of its network card"
        )
    gbps = _median(each.gbps for each in others)
    if own.gbps and gbps and own.gbps < _FACTOR * gbps:
        advice.append(
            f"the others get {gbps:.1f} Gb/s: look at the speed of its port (ethtool), "
            "its MTU, and what else uses the link"
        )
    read_gbs = _median(each.read_gbs for each in others)
    if own.read_gbs and read_gbs and own.read_gbs < _FACTOR * read_gbs:
        advice.append(
            f"the others read {read_gbs:.1f} GB/s: look for other work there, its "
            "clock and cooling, and whether all memory channels are filled"
        )
    return "; ".join(advice)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
