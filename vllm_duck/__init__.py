"""vllm_duck: DeepSeek-V3.2 in vLLM, with the routed experts on other machines."""

from vllm_duck.version import __version__ as __version__


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    from vllm_duck.hooks import install_hooks

    _log_as_vllm_does()
    install_hooks()


def _log_as_vllm_does() -> None:
    """Send this package's lines where vLLM sends its own, and as many of them.

    A parent and not its handlers: the API server gets those after this call.
    """
    import logging

    logging.getLogger(__name__).parent = logging.getLogger("vllm")
