"""The settings of vllm_duck: one frozen record.

It imports neither torch nor vLLM. Nothing else in the package reads environment
variables or raw settings.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from vllm_duck.endpoints import check_endpoint, parse_endpoints
from vllm_duck.errors import DuckConfigError

ENDPOINTS_VARIABLE = "VLLM_DUCK_ENDPOINTS"
KNOB = 'additional_config["duck"]'
_DAY_S = 86400


@dataclass(frozen=True)
class DuckConfig:
    """What a user sets with `--additional-config '{"duck": {...}}'`.

    Raises:
        DuckConfigError: a key is unknown, or a value is out of its range.
    """

    # One duck per entry, in shard order: "unix:/path" or "host:port".
    # Empty: start `local_ducks` of them on this machine and stop them at the end.
    endpoints: tuple[str, ...] = ()
    # Ducks to start here when there are no endpoints.
    local_ducks: int = 2
    # Kernel threads of each local duck. None: the machine's CPUs over the ducks.
    local_threads: int | None = None
    # Divide a step's tokens into two lanes where that is measured to be quicker: the
    # host works on one while the ducks work on the other. false never does.
    overlap: bool = True
    # Stop drafting for a request, or at a batch size, where it is measured to cost more
    # time than its tokens are worth. false drafts always.
    draft_gate: bool = True
    # "int8" or "int4": local ducks hold the experts in fewer bits. None: as the
    # checkpoint has them. Ducks behind endpoints are started with --weight-format.
    local_weight_format: Literal["int8", "int4"] | None = None
    # Seconds a duck may take for one call. A 2048-row prefill chunk of the real
    # model takes seconds on a small CPU; a hang is longer.
    deadline_s: float = 60.0
    # Seconds to wait at the start for ducks that are not up yet, for example because
    # they still load; 0 refuses at once.
    connect_s: float = 0.0
    # The dtype of partial sums on the wire. bf16 halves the bytes; fp32 keeps the
    # ducks' accumulators.
    reply_dtype: Literal["bf16", "fp32"] = "bf16"
    # What carries the calls: "auto" takes the native stream where this build has it
    # and TLS is off, else grpcio; "native" and "grpcio" insist.
    transport: Literal["auto", "native", "grpcio"] = "auto"
    # The dtype of the two KV caches. vLLM's own --kv-cache-dtype sets it: "bfloat16"
    # gives bf16, everything else that duck accepts gives fp8.
    kv_dtype: Literal["fp8", "bf16"] = "fp8"
    # PEM file of the authority that signed the ducks' certificates: turns TLS on.
    tls_ca: str | None = None
    # PEM files of the host's own certificate, for ducks that ask for one.
    tls_cert: str | None = None
    tls_key: str | None = None
    # File with the shared secret that ducks started with --token-file ask for.
    token_file: str | None = None
    # Tokens that the MTP layer drafts each step. `--speculative-config
    # '{"method": "duck_mtp1"}'` sets it; 0 is no speculation.
    num_drafts: int = 0
    # Where the worker writes figures for /metrics and the log of the API server, which
    # chooses it.
    figures_file: str | None = None
    # Run the MTP layer beside plain decoding and report how often it agrees.
    mtp_shadow: bool = False

    def __post_init__(self) -> None:
        for endpoint in self.endpoints:
            check_endpoint(endpoint)
        if len(set(self.endpoints)) != len(self.endpoints):
            _refuse("endpoints", "each endpoint once", self.endpoints)
        if self.local_ducks < 1:
            _refuse("local_ducks", ">= 1", self.local_ducks)
        if self.local_threads is not None and self.local_threads < 1:
            _refuse("local_threads", ">= 1", self.local_threads)
        if self.local_weight_format not in (None, "int8", "int4"):
            _refuse("local_weight_format", '"int8" or "int4"', self.local_weight_format)
        if not 0 < self.deadline_s <= _DAY_S:
            _refuse("deadline_s", f"> 0 and <= {_DAY_S}", self.deadline_s)
        if not 0 <= self.connect_s <= _DAY_S:
            _refuse("connect_s", f">= 0 and <= {_DAY_S}", self.connect_s)
        if self.reply_dtype not in ("bf16", "fp32"):
            _refuse("reply_dtype", '"bf16" or "fp32"', self.reply_dtype)
        if self.transport not in ("auto", "native", "grpcio"):
            _refuse("transport", '"auto", "native" or "grpcio"', self.transport)
        if self.kv_dtype not in ("fp8", "bf16"):
            _refuse("kv_dtype", '"fp8" or "bf16"', self.kv_dtype)
        if self.num_drafts < 0:
            _refuse("num_drafts", ">= 0", self.num_drafts)
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
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise DuckConfigError(
                f"{KNOB} has unknown keys {unknown}; known keys: {sorted(known)}"
            )
        values = {key: _checked(key, value) for key, value in settings.items()}
        if "endpoints" not in values and environ.get(ENDPOINTS_VARIABLE):
            values["endpoints"] = parse_endpoints(environ[ENDPOINTS_VARIABLE])
        return cls(**values)

    def to_settings(self) -> dict[str, Any]:
        """The JSON form: what the engine's processes hand to each other."""
        return {**asdict(self), "endpoints": list(self.endpoints)}


_INTEGERS = ("local_ducks", "local_threads", "num_drafts")
_BOOLEANS = ("mtp_shadow", "overlap", "draft_gate")
_NUMBERS = ("deadline_s", "connect_s")
_OPTIONAL = (
    "local_threads",
    "local_weight_format",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "token_file",
    "figures_file",
)


def _checked(key: str, value: Any) -> Any:
    if value is None and key in _OPTIONAL:
        return None
    if key == "endpoints":
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(part, str) for part in value):
            _refuse(key, "a list of strings", value)
        return tuple(value)
    if key in _INTEGERS:
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(key, "an integer", value)
    elif key in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(key, "a number of seconds", value)
    elif key in _BOOLEANS:
        if not isinstance(value, bool):
            _refuse(key, "true or false", value)
    elif not isinstance(value, str):
        _refuse(key, "a string", value)
    return value


def _refuse(key: str, expected: str, got: object) -> None:
    raise DuckConfigError(
        f'duck.{key} must be {expected}, got {got!r}; set {KNOB}["{key}"]'
    )
