"""Modules that bring their weights into the kernels' form once they are loaded."""

from abc import abstractmethod

from torch import nn


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
