"""Which layers have an indexer, by any of the three spellings of config.json.

Layers without one are "shared": they attend to what the last "full" layer has chosen.
"""

from typing import Any

from vllm_duck.models.config_values import read_int, refuse

_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}
# Source: vLLM 0.32.0, models/deepseek_v32/attention.py; transformers 5.19.0,
# GlmMoeDsaConfig.
_DEFAULT_OFFSET = 2


def read_index_layers(config: Any, num_layers: int, num_mtp: int) -> tuple[int, ...]:
    """The layers that choose by themselves; MTP layers always do.

    Raises:
        DuckConfigError: the first layer does not, or two spellings disagree.
    """
    spelled = {
        "indexer_types": _types(config, num_layers),
        "index_topk_pattern": _pattern(config, num_layers),
        "index_topk_freq": _schedule(config, num_layers),
    }
    given = {name: kinds for name, kinds in spelled.items() if kinds is not None}
    if not given:
        return tuple(range(num_layers + num_mtp))
    first, kinds = next(iter(given.items()))
    for name, others in given.items():
        if others != kinds:
            refuse(name, f"what {first} says, {kinds}", others)
    if kinds[0] != _FULL:
        refuse(first, f"{_FULL} for the first layer", kinds[0])
    full = [i for i, kind in enumerate(kinds) if kind == _FULL]
    return (*full, *range(num_layers, num_layers + num_mtp))


def _types(config: Any, num_layers: int) -> list[str] | None:
    kinds = getattr(config, "indexer_types", None)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(k not in (_FULL, _SHARED) for k in kinds):
        refuse("indexer_types", f"a list of {_FULL!r} and {_SHARED!r}", kinds)
    return _of_all("indexer_types", kinds, num_layers)


def _pattern(config: Any, num_layers: int) -> list[str] | None:
    letters = getattr(config, "index_topk_pattern", None)
    if letters is None:
        return None
    is_list = isinstance(letters, str | list)
    if not is_list or any(letter not in list(_LETTERS) for letter in letters):
        refuse("index_topk_pattern", "F and S for the layers", letters)
    kinds = [_LETTERS[letter] for letter in letters]
    return _of_all("index_topk_pattern", kinds, num_layers)


def _schedule(config: Any, num_layers: int) -> list[str] | None:
    """Every `index_topk_freq`-th layer is full, and the first few."""
    if getattr(config, "index_topk_freq", None) is None:
        return None
    freq = read_int(config, "index_topk_freq")
    offset = read_int(
        config, "index_skip_topk_offset", least=0, default=_DEFAULT_OFFSET
    )
    return [
        _SHARED if max(i - offset + 1, 0) % freq else _FULL for i in range(num_layers)
    ]


def _of_all(name: str, kinds: list[str], num_layers: int) -> list[str]:
    if len(kinds) != num_layers:
        refuse(name, f"of {num_layers} layers", f"{len(kinds)}")
    return kinds
