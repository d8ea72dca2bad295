"""The method `duck_mtp`: what a user writes, and what vLLM is told instead.

vLLM knows the method as its own "mtp", with drafts sampled from their distribution and
the rejected rows cut out of the draft batch. `duck_mtp1` is `duck_mtp` with one draft.
"""

from typing import Any

from vllm_duck.errors import DuckConfigError

METHODS = ("duck_mtp", "duck_mtp1")
MAX_DRAFTS = 7

_NUM_DRAFTS = "num_speculative_tokens"
_SETTINGS: dict[str, Any] = {
    "disable_padded_drafter_batch": True,
    "draft_sample_method": "probabilistic",
}
# Flag, attribute of vLLM's EngineArgs, key of its --speculative-config.
_SHORT_FORMS = (
    ("--spec-method", "spec_method", "method"),
    ("--spec-model", "spec_model", "model"),
    ("--spec-tokens", "spec_tokens", _NUM_DRAFTS),
)


def is_asked_for(args: Any) -> bool:
    """Whether EngineArgs ask for duck_mtp or duck_mtp1."""
    named = (args.speculative_config or {}).get("method")
    return args.spec_method in METHODS or named in METHODS


def vllm_settings(args: Any, *, is_shadow: bool) -> dict[str, Any] | None:
    """The --speculative-config for vLLM; None where no MTP layer is wanted.

    is_shadow: the layer runs without its drafts being used.

    Raises:
        DuckConfigError: another method, or a setting that this one contradicts or has
            no use for.
    """
    settings = _given(args)
    if settings:
        _check(settings, is_shadow=is_shadow)
    elif not is_shadow:
        return None
    num_drafts = settings.get(_NUM_DRAFTS, 1)
    return {"method": "mtp", _NUM_DRAFTS: num_drafts, **_SETTINGS}


def _given(args: Any) -> dict[str, Any]:
    """What a user wrote, in the long form or the short one."""
    settings = {
        key.replace("-", "_"): value
        for key, value in (args.speculative_config or {}).items()
    }
    for flag, attribute, key in _SHORT_FORMS:
        value = getattr(args, attribute)
        if value is None:
            continue
        if key in settings:
            raise DuckConfigError(
                f"{flag} must be absent where --speculative-config has {key!r}, got "
                f"{value!r} beside {settings[key]!r}; drop {flag}"
            )
        settings[key] = value
    return settings


def _check(settings: dict[str, Any], *, is_shadow: bool) -> None:
    method = settings.get("method")
    if method not in METHODS:
        raise DuckConfigError(
            f"duck needs --speculative-config to be absent or to name the method "
            f"{' or '.join(METHODS)}, got {settings!r}"
        )
    if is_shadow:
        raise DuckConfigError(
            f"duck.mtp_shadow decodes plainly, got it beside {method}, which drafts; "
            "drop mtp_shadow or --speculative-config"
        )
    for name, value in settings.items():
        if name == _NUM_DRAFTS:
            _check_num_drafts(method, value)
        elif name != "method" and name not in _SETTINGS:
            raise DuckConfigError(
                f"{method} drafts with the checkpoint's own MTP layer and takes no "
                f"{name}, got {value!r}; drop it from --speculative-config"
            )
        elif name != "method" and value != _SETTINGS[name]:
            raise DuckConfigError(
                f"{method} needs {name} to be {_SETTINGS[name]!r}, got {value!r}; "
                f"drop it from --speculative-config"
            )


def _check_num_drafts(method: str, value: Any) -> None:
    if method == "duck_mtp1" and value != 1:
        raise DuckConfigError(
            f"duck_mtp1 needs {_NUM_DRAFTS} to be 1, got {value!r}; duck_mtp takes more"
        )
    if type(value) is not int or not 1 <= value <= MAX_DRAFTS:
        raise DuckConfigError(
            f"duck_mtp needs {_NUM_DRAFTS} to be 1 to {MAX_DRAFTS}, got {value!r}"
        )
