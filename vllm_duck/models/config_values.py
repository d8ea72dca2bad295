"""Single values of config.json: read, or refused with what they have to be."""

from typing import Any, NoReturn

from vllm_duck.errors import DuckConfigError
from vllm_duck.family import size_problem

_LARGEST = 1e30


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
    expected = size_problem(name, value, least)
    if expected:
        refuse(name, expected, value)
    assert isinstance(value, int)
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
