"""Modules that bring their weights into the kernels' form once they are loaded."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from vllm_duck.errors import DuckCheckpointError
from vllm_duck.models.cpu.threads import Handle, current
from vllm_duck.models.matrix import Matrix


class HostModule(nn.Module):
    """A module whose weights are packed for the kernels once they are loaded."""

    @abstractmethod
    def finish_loading(self) -> None:
        """Pack the loaded weights and free what the kernels do not need."""


def pack_modules(root: nn.Module) -> None:
    """Pack every host module in it, each exactly once."""
    for module in list(root.modules()):
        if isinstance(module, HostModule):
            module.finish_loading()


def pack(new: Callable[..., Handle], **arguments: Any) -> Handle:
    """Call one of `_host`'s makers; matrices, one below the other, come as lists.

    Raises:
        DuckCheckpointError: the kernels have no form for them, as for a NaN.
    """
    given = {
        name: _addresses(value) if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    try:
        return new(current(), **given)
    except ValueError as error:
        lists = [value for value in arguments.values() if isinstance(value, list)]
        names = ", ".join(matrix.name for matrices in lists for matrix in matrices)
        raise DuckCheckpointError(f"{error}, in one of {names}") from error


def _addresses(matrices: Sequence[Matrix]) -> npt.NDArray[np.int64]:
    """As `parts` of csrc/host/weights_binding.cpp reads them."""
    found = [len(matrices)]
    for matrix in matrices:
        scale = 0 if matrix.scale is None else matrix.scale.data_ptr()
        found += [matrix.weight.data_ptr(), scale, matrix.shape[0]]
    return np.array(found, np.int64)
