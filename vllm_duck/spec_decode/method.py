"""The method `duck_mtp1`: what a user writes, and what vLLM is told instead.

vLLM knows the method as its own "mtp", with drafts sampled from their distribution and
the rejected rows cut out of the draft batch.
"""

from collections.abc import Mapping
from typing import Any

from vllm_duck.errors import DuckConfigError

METHOD = "duck_mtp1"
NUM_DRAFTS = 1

_SETTINGS: dict[str, Any] = {
    "num_speculative_tokens": NUM_DRAFTS,
    "disable_padded_drafter_batch": True,
    "draft_sample_method": "probabilistic",
}
# What vLLM itself writes into the settings.
_OF_VLLM = ("target_model_config", "target_parallel_config")


def is_duck_method(settings: Mapping[str, Any] | None) -> bool:
    """Whether a --speculative-config asks for duck_mtp1."""
    return settings is not None and settings.get("method") == METHOD


def vllm_settings(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings for vLLM; None stands for the method alone.

    Raises:
        DuckConfigError: a setting that the method contradicts or has no use for.
    """
    for key, value in (settings or {}).items():
        name = key.replace("-", "_")
        if name == "method":
            continue
        if name not in _SETTINGS:
            raise DuckConfigError(
                f"{METHOD} drafts with the checkpoint's own MTP layer and takes no "
                f"{name}, got {value!r}; drop it from --speculative-config"
            )
        if value != _SETTINGS[name]:
            raise DuckConfigError(
                f"{METHOD} needs {name} to be {_SETTINGS[name]!r}, got {value!r}; "
                f"drop it from --speculative-config"
            )
    return {"method": "mtp", **_SETTINGS}


def is_rewritten(settings: Mapping[str, Any] | None) -> bool:
    """Whether these are `vllm_settings` of an earlier call."""
    own = {k: v for k, v in (settings or {}).items() if k not in _OF_VLLM}
    return own == vllm_settings(None)
