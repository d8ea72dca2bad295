"""ModelFamily: the names and rules by which models of one architecture differ.

A family is one file in `families/`. What its models compute
is in the classes that the record names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class ReadInt(Protocol):
    """Reads an integer of config.json; refuses what is none, or less than `least`."""

    def __call__(
        self, key: str, *, least: int = 1, default: int | None = None
    ) -> int: ...


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
class ModelFamily:
    """All that the package knows of an architecture by name."""

    # As people write it, for messages.
    name: str
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
    # Keys of config.json that change what the model computes, and the one value that
    # its classes compute. Absent and null are fine.
    required: Mapping[str, object]
    # What config.json's `layer_types` calls every layer, where it has that list.
    layer_type: str

    @property
    def classes(self) -> dict[str, str]:
        """As vLLM's `model_class_overrides` takes them."""
        return {
            self.architecture: self.model_class,
            self.mtp_architecture: self.mtp_class,
        }
