"""All ducks of a model as one: connected, checked together, called together."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from vllm_duck.config import DEFAULT_DEADLINE_S, TransportName
from vllm_duck.errors import (
    DuckConfigError,
    DuckProtocolError,
    DuckTransportError,
    DuckUnavailable,
)
from vllm_duck.executor.duck import (
    PROTOCOL_VERSION,
    REQUANTIZED_FORMATS,
    Describer,
    DuckInfo,
    DuckStatistics,
    FanOut,
    InFlight,
    ModelSummary,
    MoeRequest,
    MoeSum,
    ReplyDtype,
)
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.transports import choose_transport
from vllm_duck.executor.weights.plan import check_tiling
from vllm_duck.executor.wire.identity import identity_of
from vllm_duck.executor.wire.recovery import Watcher
from vllm_duck.executor.wire.security import ClientSecurity

_CONNECT_POLL_S = 0.2


class Fleet:
    """The ducks that together hold the model, in duck order."""

    def __init__(
        self,
        describers: Sequence[Describer],
        identities: Sequence[str],
        fan_out: FanOut,
        *,
        transport: str = "",
    ) -> None:
        """All of the same ducks, in the same order.

        identities: as identity_of() says them.
        transport: what a log says of the fan-out.
        """
        self._describers = tuple(describers)
        self._identities = tuple(identities)
        self._fan_out = fan_out
        self.transport = transport

    @classmethod
    def connect(
        cls,
        endpoints: Sequence[str],
        *,
        expect: ModelSummary | None = None,
        connect_s: float = 0.0,
        deadline_s: float = DEFAULT_DEADLINE_S,
        reply_dtype: ReplyDtype = "bf16",
        security: ClientSecurity | None = None,
        transport: TransportName = "auto",
        recover_s: float = 0.0,
        watcher: Watcher | None = None,
    ) -> "Fleet":
        """Connect to every duck and check that together they are the model.

        Each connection, the first and every later one, proves that the duck that was
        checked is behind it, before a request is sent.

        connect_s: how long to wait for ducks that are not up yet.
        recover_s: how long a lost duck is waited for, later; 0 fails its calls at once.
        watcher: hears of ducks that are lost, and back.

        Raises:
            DuckConfigError: the ducks do not tile the model, or are of another one, or
                the transport cannot be had.
            DuckTransportError: a duck does not answer, or not as a duck.
        """
        security = security or ClientSecurity()
        choice = choose_transport(transport, has_tls=security.tls_ca is not None)
        describers = [
            GrpcDescriber(endpoint, deadline_s=deadline_s, security=security)
            for endpoint in endpoints
        ]
        infos = check_ducks(describers, expect, connect_s=connect_s)
        identities = [identity_of(info) for info in infos]
        fan_out = choice.transport.connect(
            endpoints,
            identities=identities,
            deadline_s=deadline_s,
            reply_dtype=reply_dtype,
            security=security,
            recover_s=recover_s,
            watcher=watcher,
        )
        return cls(describers, identities, fan_out, transport=choice.reason)

    def describe(self) -> list[DuckInfo]:
        """Ask every duck, all at once, what it holds now.

        Raises:
            DuckTransportError: the first duck in order that does not answer well.
        """
        return _describe_all(self._describers, connect_s=0.0)

    def missing(self, deadline_s: float) -> dict[str, str]:
        """Ask every duck, all at once, whether it is there: who is not, and why."""

        def problem_of(duck: Describer, identity: str) -> str:
            try:
                duck.check(identity, deadline_s)
            except DuckTransportError as error:
                return str(error).removeprefix(f"duck {duck.name} ")
            return ""

        with ThreadPoolExecutor(len(self._describers), "duck-check") as pool:
            found = pool.map(problem_of, self._describers, self._identities)
            named = zip(self._describers, found, strict=True)
            return {duck.name: problem for duck, problem in named if problem}

    def send(self, request: MoeRequest) -> InFlight[MoeSum]:
        """Send one request to all ducks and return at once; several may be in flight.

        Raises:
            DuckTransportError: a duck is gone.
        """
        return self._fan_out.send(request)

    def begin_step(self, limit_s: float) -> None:
        """A step begins, which waits for lost ducks for `limit_s` at most in all."""
        self._fan_out.begin_step(limit_s)

    def statistics(self) -> list[DuckStatistics]:
        return self._fan_out.statistics()

    def close(self) -> None:
        self._fan_out.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_ducks(
    describers: Sequence[Describer],
    expect: ModelSummary | None = None,
    *,
    connect_s: float = 0.0,
) -> list[DuckInfo]:
    """Check that the ducks are of one protocol and model, and tile it exactly.

    Raises:
        DuckProtocolError: a duck of another protocol version.
        DuckConfigError: no duck at all; a duck of another model or another
            --weight-format than the first; a gap or an overlap.
        DuckTransportError: a duck does not answer, or not as a duck.
    """
    if not describers:
        raise DuckConfigError("a fleet needs at least one duck; set duck.endpoints")
    infos = _describe_all(describers, connect_s=connect_s)
    names = [duck.name for duck in describers]
    for name, info in zip(names, infos, strict=True):
        _check_version(name, info)
    if expect is None:
        expect, owner = infos[0].model, f"duck {names[0]}"
    else:
        owner = "this host"
    for name, info in zip(names, infos, strict=True):
        _check_model(name, info.model, expect, owner=owner)
    _check_weight_formats(names, infos)
    check_tiling(
        [info.shard for info in infos],
        [f"duck {name}" for name in names],
        num_columns=expect.moe_intermediate_size,
        num_experts=expect.n_routed_experts,
    )
    return infos


def _describe_all(
    describers: Sequence[Describer], *, connect_s: float
) -> list[DuckInfo]:
    """All at once; waits for those that are not up yet."""
    give_up_s = time.monotonic() + connect_s
    with ThreadPoolExecutor(len(describers), "duck-describe") as pool:
        return list(pool.map(lambda duck: _describe_until(duck, give_up_s), describers))


def _describe_until(duck: Describer, give_up_s: float) -> DuckInfo:
    while True:
        try:
            return duck.describe()
        except DuckUnavailable:
            if time.monotonic() >= give_up_s:
                raise
        time.sleep(_CONNECT_POLL_S)


def _check_version(name: str, info: DuckInfo) -> None:
    if info.protocol_version != PROTOCOL_VERSION:
        raise DuckProtocolError(
            f"duck {name} speaks protocol version {info.protocol_version}, this host "
            f"{PROTOCOL_VERSION}; install the same vllm_duck on both"
        )


def _check_model(
    name: str, got: ModelSummary, expect: ModelSummary, *, owner: str
) -> None:
    if got.weight_format in REQUANTIZED_FORMATS.values():
        # Made from whatever the checkpoint has.
        got = replace(got, weight_format=expect.weight_format)
    for what in ModelSummary.__dataclass_fields__:
        expected_value, got_value = getattr(expect, what), getattr(got, what)
        if got_value != expected_value:
            raise DuckConfigError(
                f"duck {name} has {what} {got_value}, {owner} has {expected_value}; "
                "start all ducks and the host with the same checkpoint"
            )


def _check_weight_formats(names: Sequence[str], infos: Sequence[DuckInfo]) -> None:
    first = infos[0].weight_format
    for name, info in zip(names, infos, strict=True):
        if info.weight_format != first:
            raise DuckConfigError(
                f"duck {name} holds {info.weight_format}, duck {names[0]} {first}; "
                "split or serve all of them with the same --weight-format"
            )
