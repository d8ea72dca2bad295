"""The one error tree of vllm_duck.

    DuckError
    ├── DuckConfigError(ValueError)      a setting, or a combination of them
    ├── DuckCheckpointError(ValueError)  a checkpoint or shard file
    ├── DuckShapeError(ValueError)       a tensor's or message's shape, dtype, range
    └── DuckTransportError               a duck could not be reached or asked
        ├── DuckUnavailable              no connection, or the duck went away
        ├── DuckTimeout                  the deadline passed
        └── DuckProtocolError            the peer is no duck of this protocol

Messages say what was expected, what was got, and the knob to turn.
"""


class DuckError(Exception):
    """Base of every error that vllm_duck raises on purpose."""


class DuckConfigError(DuckError, ValueError):
    """A setting, or a combination of settings, is wrong."""


class DuckCheckpointError(DuckError, ValueError):
    """A checkpoint or shard file is not what it must be."""


class DuckShapeError(DuckError, ValueError):
    """A tensor or message has the wrong shape, dtype or range."""


class DuckTransportError(DuckError):
    """A duck could not be reached or did not answer well."""


class DuckUnavailable(DuckTransportError):
    """There is no connection to the duck, or it went away."""


class DuckTimeout(DuckTransportError):
    """The duck did not answer before the deadline."""


class DuckProtocolError(DuckTransportError):
    """The peer answered, but not as a duck of this protocol version."""
