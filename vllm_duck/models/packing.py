"""Modules that bring their weights into another form once they are loaded."""

from abc import abstractmethod

from torch import nn


class HostModule(nn.Module):
    """A module whose weights are packed for the kernels once they are loaded."""

    @abstractmethod
    def finish_loading(self) -> None:
        """Pack the loaded weights and free what the kernels do not need."""


def finish_loading(model: nn.Module) -> None:
    """Pack every host module of the model, each exactly once, after its weights.

    The loader calls it, before vLLM's process_weights_after_loading prepares the LM
    head for a kernel of vLLM's.
    """
    for module in list(model.modules()):
        if isinstance(module, HostModule):
            module.finish_loading()
