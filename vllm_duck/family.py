"""ModelFamily: the names and rules by which models of one architecture differ.

A family is one file in `families/`. Its rules say what its layers compute; how, is in
the host's backend (`models/cpu/`), which refuses a rule that it has no code for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from vllm_duck.errors import DuckConfigError


class ReadInt(Protocol):
    """Reads an integer of config.json; refuses what is none, or less than `least`."""

    def __call__(
        self, key: str, *, least: int = 1, default: int | None = None
    ) -> int: ...


# What a size has room for in C++, and more layers than any model has.
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000
_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")


def size_problem(key: str, value: object, least: int) -> str:
    """What a size in config.json has to be, where the value is not; else nothing."""
    if type(value) is not int or value < least:
        return f"an integer >= {least}"
    most = _MOST_LAYERS if key in _LAYER_COUNTS else _MOST
    return "" if value <= most else f"<= {most}"


@dataclass(frozen=True)
class TensorNames:
    """What a checkpoint calls its tensors, but for those within attention and MLP.

    Without the end: ".weight", ".weight_scale_inv".
    """

    embedding: str
    norm: str
    head: str
    # Followed by the layer's index.
    layers: str
    # Within a MoE layer; followed by the expert's id and a projection.
    experts: str
    # By "gate", "up" and "down".
    projections: Mapping[str, str]
    # Within the MTP layer. A checkpoint may lack the first two: they are the target's.
    mtp_embedding: str
    mtp_head: str
    mtp_embedding_norm: str
    mtp_hidden_norm: str
    mtp_projection: str
    mtp_norm: str

    def layer(self, layer_idx: int) -> str:
        return f"{self.layers}.{layer_idx}"

    def expert(self, layer_idx: int, expert_id: int, projection: str) -> str:
        """projection: "gate", "up" or "down"."""
        layer, name = self.layer(layer_idx), self.projections[projection]
        return f"{layer}.{self.experts}.{expert_id}.{name}"

    def is_expert(self, name: str) -> bool:
        """Whether a tensor is a routed expert's."""
        return f".{self.experts}." in name


@dataclass(frozen=True)
class Rule:
    """One way to compute a part of a layer, by the name that backends know it by."""

    name: str
    # Keys of config.json that say so, and the values with which they do. Absent and
    # null are fine.
    config: Mapping[str, object]


@dataclass(frozen=True)
class LayerRules:
    """What the layers compute where families differ."""

    # How a token's experts and their weights are chosen.
    router: Rule
    # Which layers choose by themselves what they attend to (models/index_layers.py).
    indexer: Rule
    # Which channels RoPE turns together, in the attention and in its indexer.
    rope: Rule
    index_rope: Rule


@dataclass(frozen=True)
class ModelFamily:
    """All that the package knows of an architecture by name."""

    # As people write it, for messages.
    name: str
    # The models that are served, as their publishers call them.
    models: tuple[str, ...]
    # As config.json's `architectures` has it.
    architecture: str
    # As vLLM calls the MTP layer when it is the draft model.
    mtp_architecture: str
    # What vLLM builds for the two: "module:class", imported only by the host.
    model_class: str
    mtp_class: str
    # Whether a layer has routed experts, MTP layers included.
    is_moe_layer: Callable[[ReadInt, int], bool]
    tensors: TensorNames
    rules: LayerRules
    # Further keys of config.json that change what the model computes, and the one value
    # that is computed. Absent and null are fine.
    required: Mapping[str, object]
    # What config.json's `layer_types` calls every layer, where it has that list.
    layer_type: str

    @property
    def config_values(self) -> dict[str, object]:
        """Keys of config.json that a model may have with this value alone."""
        rules = [getattr(self.rules, name) for name in LayerRules.__dataclass_fields__]
        return {**self.required, **{k: v for r in rules for k, v in r.config.items()}}

    def require(self, **computed: tuple[str, ...]) -> None:
        """Refuse to compute the family's layers by other rules than these.

        computed: of each kind of rule, the names of those that there is code for.

        Raises:
            DuckConfigError: the family has another rule of that name.
        """
        for what, names in computed.items():
            rule: Rule = getattr(self.rules, what)
            if rule.name not in names:
                known = " or ".join(map(repr, names))
                raise DuckConfigError(
                    f"this host computes the {what} rule {known}, got {rule.name!r} "
                    f"of {self.name}; it has to be written first (docs/backends.md)"
                )

    @property
    def classes(self) -> dict[str, str]:
        """As vLLM's `model_class_overrides` takes them."""
        return {
            self.architecture: self.model_class,
            self.mtp_architecture: self.mtp_class,
        }
