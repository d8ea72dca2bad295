"""The settings of vllm_duck, and what its processes tell each other at the start.

The package's own environment variables are read here and nowhere else. Imports neither
torch nor vLLM.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from vllm_duck.endpoints import join_replicas, parse_endpoints, replicas_of
from vllm_duck.errors import DuckConfigError

ENDPOINTS_VARIABLE = "VLLM_DUCK_ENDPOINTS"
ISA_VARIABLE = "VLLM_DUCK_ISA"
VARIABLES = (ENDPOINTS_VARIABLE, ISA_VARIABLE)

# Keys of vLLM's additional_config: the user's, and the package's own.
SETTINGS_KEY = "duck"
HAND_OVER_KEY = "duck_hand_over"
KNOB = f'additional_config["{SETTINGS_KEY}"]'

# Seconds a duck may take for one call. A 2048-row prefill chunk of the real model takes
# seconds on a small CPU; a hang is longer.
DEFAULT_DEADLINE_S = 60.0
_DAY_S = 86400

# Those of executor/transports.py, or "auto": the first of them that can serve.
TransportName = Literal["auto", "native", "grpcio"]


@dataclass(frozen=True)
class DuckConfig:
    """What a user sets with `--additional-config '{"duck": {...}}'`.

    Raises:
        DuckConfigError: a key is unknown, or a value is out of its range.
    """

    # One duck per entry, in shard order: "unix:/path" or "host:port". Replicas, which
    # hold the same slice, have | in between, or are a list in JSON.
    # Empty: start `local_ducks` of them on this machine and stop them at the end.
    endpoints: tuple[str, ...] = ()
    # Ducks to start here when there are no endpoints.
    local_ducks: int = 2
    # Kernel threads of each local duck. None: the machine's CPUs, or what the cgroup's
    # quota allows of them, over the ducks.
    local_threads: int | None = None
    # Divide a step's tokens into two lanes where that is measured to be quicker: the
    # host works on one while the ducks work on the other. false never does.
    overlap: bool = True
    # Draft as many tokens for each request as are measured to be worth their time, or
    # none. false drafts as many as --speculative-config says, always.
    draft_gate: bool = True
    # "int8" or "int4": local ducks hold the experts in fewer bits. None: as the
    # checkpoint has them. Ducks behind endpoints are started with --weight-format.
    local_weight_format: Literal["int8", "int4"] | None = None
    # Seconds a duck may take for one call.
    deadline_s: float = DEFAULT_DEADLINE_S
    # Seconds that a step waits for a duck that is lost or late, before its requests
    # fail; 0 fails them at once. Long enough for a restart from a page cache, and with
    # deadline_s well within vLLM's own limit for a step, 300 s.
    recover_s: float = 60.0
    # Seconds to wait at the start for ducks that are not up yet, for example because
    # they still load; 0 refuses at once.
    connect_s: float = 0.0
    # The dtype of partial sums on the wire. bf16 halves the bytes; fp32 keeps the
    # ducks' accumulators.
    reply_dtype: Literal["bf16", "fp32"] = "bf16"
    # What carries the calls: "auto" takes the native stream where this build has it,
    # and its TLS if that is on, else grpcio; "native" and "grpcio" insist.
    transport: TransportName = "auto"
    # PEM file of the authority that signed the ducks' certificates: turns TLS on.
    tls_ca: str | None = None
    # PEM files of the host's own certificate, for ducks that ask for one.
    tls_cert: str | None = None
    tls_key: str | None = None
    # File with the shared secret that ducks started with --token-file ask for.
    token_file: str | None = None
    # Run the MTP layer beside plain decoding and report how often it agrees.
    mtp_shadow: bool = False

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(type(self)).items():
            _check_type(key, hint, getattr(self, key))
        endpoints = [each for duck in self.endpoints for each in replicas_of(duck)]
        if len(set(endpoints)) != len(endpoints):
            _refuse("endpoints", "each endpoint once", self.endpoints)
        if self.local_ducks < 1:
            _refuse("local_ducks", ">= 1", self.local_ducks)
        if self.local_threads is not None and self.local_threads < 1:
            _refuse("local_threads", ">= 1", self.local_threads)
        if not 0 < self.deadline_s <= _DAY_S:
            _refuse("deadline_s", f"> 0 and <= {_DAY_S}", self.deadline_s)
        if not 0 <= self.recover_s <= _DAY_S:
            _refuse("recover_s", f">= 0 and <= {_DAY_S}", self.recover_s)
        if not 0 <= self.connect_s <= _DAY_S:
            _refuse("connect_s", f">= 0 and <= {_DAY_S}", self.connect_s)
        if (self.tls_cert is None) != (self.tls_key is None):
            _refuse("tls_cert and tls_key", "both or neither", self.tls_cert)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], environ: Mapping[str, str]
    ) -> "DuckConfig":
        """Read the `duck` block; VLLM_DUCK_ENDPOINTS stands in for `endpoints`.

        Raises:
            DuckConfigError: a key is unknown or of the wrong type.
        """
        if not isinstance(settings, Mapping):
            raise DuckConfigError(
                f"{KNOB} must be a JSON object, got {settings!r}; {{}} takes every "
                "default, and leaving the block out turns duck off"
            )
        _refuse_unknown(settings, [field.name for field in fields(cls)])
        values = dict(settings)
        if "endpoints" not in values:
            values["endpoints"] = environment_endpoints(environ)
        elif isinstance(values["endpoints"], list):
            values["endpoints"] = tuple(map(_joined, values["endpoints"]))
        return cls(**values)

    @classmethod
    def of(cls, vllm_config: Any) -> "DuckConfig":
        """The settings of an engine with ducks, in any of its processes."""
        return cls.from_settings(vllm_config.additional_config[SETTINGS_KEY], {})

    def to_settings(self) -> dict[str, Any]:
        """The JSON form: what the engine's processes hand to each other."""
        return {**asdict(self), "endpoints": list(self.endpoints)}


@dataclass(frozen=True)
class HandOver:
    """What the process that configures an engine tells those that run it."""

    # The dtype of the two KV caches, by vLLM's --kv-cache-dtype.
    kv_dtype: Literal["fp8", "bf16"]
    # Where the worker writes figures for /metrics and the log of the API server.
    figures_file: str
    # Where it says which ducks are lost, for the API server's /health.
    health_file: str

    @classmethod
    def of(cls, vllm_config: Any) -> "HandOver":
        return cls(**vllm_config.additional_config[HAND_OVER_KEY])


def is_duck_engine(vllm_config: Any) -> bool:
    """Whether `setup_engine` made this configuration."""
    return HAND_OVER_KEY in (vllm_config.additional_config or {})


def environment_endpoints(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What VLLM_DUCK_ENDPOINTS names; empty if it is not set.

    Raises:
        DuckConfigError: it is no list of endpoints.
    """
    return parse_endpoints(environ.get(ENDPOINTS_VARIABLE, ""))


def environment_isa() -> str:
    """The instruction set that VLLM_DUCK_ISA asks for; "" is the best there is."""
    return os.environ.get(ISA_VARIABLE, "")


# Keys that a user may look for here, and where they are set.
_SET_ELSEWHERE = {
    "kv_dtype": "vLLM's --kv-cache-dtype",
    "num_drafts": "vLLM's --speculative-config",
    "figures_file": "vllm_duck itself",
}
_EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number of seconds",
    str: "a string",
}


def _joined(entry: Any) -> Any:
    """A list of replicas as one string; what is neither is refused by its type."""
    is_list = isinstance(entry, list) and all(isinstance(each, str) for each in entry)
    return join_replicas(entry) if is_list else entry


def _refuse_unknown(settings: Mapping[str, Any], known: list[str]) -> None:
    unknown = sorted(set(settings) - set(known))
    if not unknown:
        return
    hints = [
        f"; {key} is set by {_SET_ELSEWHERE[key]}"
        for key in unknown
        if key in _SET_ELSEWHERE
    ]
    raise DuckConfigError(
        f"{KNOB} has unknown keys {unknown}; known keys: {sorted(known)}"
        + "".join(hints)
    )


def _check_type(key: str, hint: Any, value: Any) -> None:
    """hint: the field's annotation, one type or that type and None."""
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = get_args(hint) if is_union else (hint,)
    if value is None and NoneType in kinds:
        return
    kind = kinds[0]
    if get_origin(kind) is tuple:
        is_tuple = isinstance(value, tuple)
        if not is_tuple or not all(isinstance(part, str) for part in value):
            _refuse(key, "a list of strings", value)
    elif get_origin(kind) is Literal:
        if value not in get_args(kind):
            _refuse(key, " or ".join(f'"{name}"' for name in get_args(kind)), value)
    elif isinstance(value, bool) != (kind is bool) or not isinstance(
        value, int | float if kind is float else kind
    ):
        _refuse(key, _EXPECTED[kind], value)


def _refuse(key: str, expected: str, got: object) -> NoReturn:
    raise DuckConfigError(
        f'duck.{key} must be {expected}, got {got!r}; set {KNOB}["{key}"]'
    )
