"""vllm_duck: DeepSeek-V3.2 in vLLM, with the routed experts on other machines."""

__version__ = "0.1.0"
# The one version of vLLM that this package is written for; setup.py reads it too.
VLLM_VERSION = "0.32.0"


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
