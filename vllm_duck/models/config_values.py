"""Single values of config.json: read, or refused with what they have to be."""

from typing import Any, NoReturn

from vllm_duck.errors import DuckConfigError

# What a size has room for in C++, and more layers than any model has.
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000
_LARGEST = 1e30
_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")


def read_int(
    config: Any, key: str, *, least: int = 1, default: int | None = None
) -> int:
    """`family.ReadInt`, once it has its config."""
    value = getattr(config, key, None)
    if value is None:
        value = default
    return require_int(key, value, least=least)


def read_bool(config: Any, key: str, *, default: bool) -> bool:
    """Absent and null are the default.

    Raises:
        DuckConfigError: it is something else than true and false.
    """
    value = getattr(config, key, None)
    if value is None:
        return default
    return require_bool(key, value)


def require_int(name: str, value: object, *, least: int) -> int:
    if type(value) is not int or value < least:
        refuse(name, f"an integer >= {least}", value)
    most = _MOST_LAYERS if name in _LAYER_COUNTS else _MOST
    if value > most:
        refuse(name, f"<= {most}", value)
    return value


def require_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, "a number", value)
    # Not NaN either, nor an integer that no float holds.
    if not abs(value) < _LARGEST:
        refuse(name, f"below {_LARGEST}", value)
    return float(value)


def require_bool(name: str, value: object) -> bool:
    if type(value) is not bool:
        refuse(name, "true or false", value)
    return value


def require(name: str, got: object, expected: object) -> None:
    """Refuse any other value than this one; absent and null are fine."""
    if got is not None and got != expected:
        refuse(name, "absent" if expected is None else repr(expected), got)


def refuse(name: str, expected: str, got: object) -> NoReturn:
    """
    Raises:
        DuckConfigError: always.
    """
    raise DuckConfigError(
        f"config.json: {name} must be {expected}, got {got!r}; duck computes no "
        "other model"
    )
